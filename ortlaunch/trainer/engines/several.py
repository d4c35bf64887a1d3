"""Several models of a script, each with an engine, as one engine to the run: they are logged and saved together."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ortlaunch.models.task import Task
from ortlaunch.trainer.checkpoint.host import HostMemory
from ortlaunch.trainer.checkpoint.torch_state import Write
from ortlaunch.trainer.engine import Engine


class Several(Engine):
    """Engines that are asked one after the other. Forward, backward and step are those of a single one."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        """
        Args:
            engines: at least two, in the order in which the script has wrapped their models.
        """
        first = engines[0]
        self._engines = engines
        self.inner, self.module = first.inner, first.module
        self.task = Task(())
        self.sends_buffers = first.sends_buffers
        # What is not finite in one model keeps all of them as they are.
        self.guard = first.guard
        for engine in engines:
            engine.guard = self.guard

    @property
    def known_discarded(self) -> bool:  # type: ignore[override]
        """As of an engine."""
        return any(engine.known_discarded for engine in self._engines)

    def exchange(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        stack = contextlib.ExitStack()
        for engine in self._engines:
            stack.enter_context(engine.exchange(last=last))
        return stack

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        raise NotImplementedError("a loss belongs to one of the models")

    def step(self) -> torch.Tensor | float | None:
        raise NotImplementedError("each model has its own step")

    def check_agreement(self) -> None:
        for engine in self._engines:
            engine.check_agreement()

    @property
    def lr(self) -> float:
        return self._engines[0].lr

    @property
    def loss_scale(self) -> float | None:
        return self._engines[0].loss_scale

    def snapshot(self, folder: Path, *, shared: bool, memory: HostMemory) -> Write:
        writes = [
            engine.snapshot(folder / str(number), shared=shared, memory=memory)
            for number, engine in enumerate(self._engines)
        ]

        def write(group: dist.ProcessGroup) -> None:
            for one in writes:
                one(group)

        return write

    def restore(self, folder: Path, saved_workers: int, scratch: Path, group: dist.ProcessGroup) -> None:
        for number, engine in enumerate(self._engines):
            engine.restore(folder / str(number), saved_workers, scratch, group)

    def weights(self) -> dict[str, torch.Tensor]:
        return {
            f"{number}.{name}": value
            for number, engine in enumerate(self._engines)
            for name, value in engine.weights().items()
        }
