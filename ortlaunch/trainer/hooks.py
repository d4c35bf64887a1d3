"""What acts at certain points of a run beside the training itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from ortlaunch.models.task import Batch

_NOTHING = contextlib.nullcontext()


class Hook:
    """Acts at some points of a run; each method does nothing by default.

    Those that return whether they took time: the throughput of such a window counts for no summary.
    """

    def start(self) -> None:
        """Before the first step."""

    def step_begins(self, step: int) -> None:
        """Before the first micro-batch of a step is taken."""

    def micro_batch_begins(self, step: int, index: int, batch: Batch) -> bool:
        """Before the forward of a micro-batch, the `index`-th of its step; returns whether it took time."""
        return False

    def micro_batch_ends(self, batch: Batch) -> bool:
        """After the backward of a micro-batch; returns whether it took time."""
        return False

    def step_ends(self, step: int) -> bool:
        """After the optimizer's step; returns whether the step took longer for this hook."""
        return False

    def step(self) -> None:
        """After a step that has been logged, where it is."""

    def evaluation(self) -> None:
        """After an evaluation."""

    def checkpoint(self) -> None:
        """After a checkpoint's state has been copied; it may still be being written."""

    def end(self) -> None:
        """After the last step and its checkpoint."""

    def evaluates(self, batch: Batch) -> None:
        """Before a held-out batch is evaluated, while the engine is evaluating; the batch is on the device."""

    def evaluated(self, batch: Batch) -> None:
        """After a held-out batch, while the engine is evaluating; the batch is on the device."""

    def span(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """The context of a named part of a step."""
        return _NOTHING


class Hooks(Hook):
    """Several hooks, called in their order."""

    def __init__(self, hooks: Sequence[Hook], disturbed: Callable[[], None]) -> None:
        """
        Args:
            hooks: what to call.
            disturbed: called at the end of a step for which a hook took time.
        """
        self._hooks = hooks
        self._disturbed = disturbed
        self._took_time = False

    def start(self) -> None:
        for hook in self._hooks:
            hook.start()

    def step_begins(self, step: int) -> None:
        for hook in self._hooks:
            hook.step_begins(step)

    def micro_batch_begins(self, step: int, index: int, batch: Batch) -> bool:
        for hook in self._hooks:
            self._took_time |= hook.micro_batch_begins(step, index, batch)
        return self._took_time

    def micro_batch_ends(self, batch: Batch) -> bool:
        for hook in self._hooks:
            self._took_time |= hook.micro_batch_ends(batch)
        return self._took_time

    def step_ends(self, step: int) -> bool:
        took_time, self._took_time = self._took_time, False
        for hook in self._hooks:
            took_time |= hook.step_ends(step)
        if took_time:
            self._disturbed()
        return took_time

    def step(self) -> None:
        for hook in self._hooks:
            hook.step()

    def evaluation(self) -> None:
        for hook in self._hooks:
            hook.evaluation()

    def checkpoint(self) -> None:
        for hook in self._hooks:
            hook.checkpoint()

    def end(self) -> None:
        for hook in self._hooks:
            hook.end()

    def evaluates(self, batch: Batch) -> None:
        for hook in self._hooks:
            hook.evaluates(batch)

    def evaluated(self, batch: Batch) -> None:
        for hook in self._hooks:
            hook.evaluated(batch)

    def span(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Of the first hook that names spans; at most one profiler runs."""
        return next((span for hook in self._hooks if (span := hook.span(name)) is not _NOTHING), _NOTHING)
