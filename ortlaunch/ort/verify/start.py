"""The check at a run's start: what would go wrong in silence is found on the run's own first batches.

It works with the run's own ORTModule, so that nothing is exported twice: the first training forward makes the export
that the run needs anyway, and the exported graph, run once more with its dropout off, must give PyTorch's outputs for
batches that it was not traced with. Weights, buffers, gradients and random numbers are left as they were; ONNX
Runtime's own random numbers are not, so that the caller seeds them afterwards. The wrapper of the trainer (DDP,
DeepSpeed) is passed by: no hook of it is called.

Here tolerances are wide: what is looked for is another result, not another rounding.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ortlaunch.config.options import TRAPS
from ortlaunch.models.task import Batch, Task
from ortlaunch.ort import session
from ortlaunch.ort.verify.examination import Examination
from ortlaunch.ort.verify.pair import Context
from ortlaunch.ort.verify.state import ModelState, same_random_numbers
from ortlaunch.ort.verify.trace import TraceWarning, trace_warnings
from ortlaunch.ort.verify.trap import Finding

FRESH_BATCHES = 2
"""Batches that the graph is tried on, besides the one that it is traced with."""


class QuickCheck:
    """Compares one worker's ORTModule with the plain model inside it."""

    def __init__(self, wrapped: torch.nn.Module, task: Task, precision: Context) -> None:
        """
        Args:
            wrapped: the ORTModule, before its first forward or after.
            task: how the model is called.
            precision: the context in which the run calls the model (autocast).
        """
        self._wrapped = wrapped
        self._task = task
        self._precision = precision
        self._warnings: list[TraceWarning] = []

    def findings(self, batches: list[Batch], warnings: Iterable[TraceWarning] = ()) -> list[Finding]:
        """What is wrong; empty where nothing is, and where the model fell back to PyTorch.

        Args:
            batches: on the model's device; the first is the one to export with.
            warnings: what was said while it was exported, if it is already.
        """
        with same_random_numbers():
            self._warnings = list(warnings)
            state = ModelState(session.plain_model(self._wrapped))
            try:
                return self._findings(batches, state)
            finally:
                state.restore()

    def _findings(self, batches: list[Batch], state: ModelState) -> list[Finding]:
        with trace_warnings() as new:
            self._forward(batches[0])
        self._warnings += new
        if not session.is_active(self._wrapped):
            # It fell back to PyTorch (backend.fallback=warn): there is nothing to compare.
            return []
        examination = Examination(self._wrapped, self._task, self._precision, state, batches, self._warnings)
        findings = [trap.finding(examination) for trap in TRAPS.values()]
        return [finding for finding in findings if finding is not None]

    def _forward(self, batch: Batch) -> None:
        with self._precision():
            self._task.outputs(self._wrapped, batch)
