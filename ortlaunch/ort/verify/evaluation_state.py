"""Finds whether training reads values of Python that forward changes in evaluation mode.

ONNX Runtime's graph for evaluation runs no Python, so such a value stays as it is, where PyTorch changes it with each
evaluated batch. The check at the start trains only, and does not see it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ortlaunch.models.task import Batch, Task
from ortlaunch.ort.verify.examination import WIDER
from ortlaunch.ort.verify.gap import widest
from ortlaunch.ort.verify.kept import Kept, kept
from ortlaunch.ort.verify.pair import Context
from ortlaunch.ort.verify.state import ModelState, copied, same_random_numbers, seed_all

_SEED = 3


class EvaluationState:
    """The values of a model before and after its last forward in evaluation mode that has changed some."""

    def __init__(self) -> None:
        self._before: Kept | None = None
        self._changed = ""

    @contextlib.contextmanager
    def watched(self, model: torch.nn.Module) -> Iterator[None]:
        """Around forwards of the plain model in evaluation mode."""
        before = kept(model)
        yield
        if changed := before.changed(kept(model)):
            self._before = before
            self._changed = " and ".join(sorted({f"{path[0]}.{path[1]}".lstrip(".") for path in changed}))

    def read_in_training(self, model: torch.nn.Module, task: Task, precision: Context, batch: Batch) -> str:
        """The names of what has changed, if the loss in training mode depends on it; else empty.

        Args:
            model: the plain model, which trains. Its values, buffers and random numbers are left as they are.
            task: how the model is called.
            precision: the context in which the run calls the model (autocast).
            batch: on the model's device.
        """
        if self._before is None:
            return ""
        now, state = kept(model), ModelState(model)

        def loss() -> torch.Tensor:
            try:
                with same_random_numbers(), torch.no_grad(), precision():
                    seed_all(_SEED)
                    return task.loss(model, copied(batch))
            finally:
                state.restore_buffers()

        try:
            later = loss()
            self._before.restore()
            gap = widest({"loss": loss()}, {"loss": later})
        finally:
            now.restore()
            self._before = None
        return self._changed if gap.exceeds(WIDER * gap.tolerance) else ""
