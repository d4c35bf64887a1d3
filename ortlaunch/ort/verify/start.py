"""The check at the start of a run, which finds silent errors on the run's own first batches.

It uses the run's own ORTModule, so nothing is exported twice. The first training forward makes the export that the run
needs anyway. The exported graph is then run with dropout off, and must return PyTorch's outputs for batches that it was
not traced with. Weights, buffers, gradients and random numbers are restored, except ONNX Runtime's own random numbers,
so the caller seeds them afterwards. The trainer's wrapper (DDP, DeepSpeed) is bypassed, so none of its hooks is called.

Tolerances are wide, because the check looks for wrong results and not for rounding errors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ortlaunch.config.schema import Allow
from ortlaunch.models.task import Batch, Task
from ortlaunch.ort import session
from ortlaunch.ort.verify.pair import Context, Gap, Pair, changed_decisions, widest
from ortlaunch.ort.verify.reference import SourceLine
from ortlaunch.ort.verify.state import ModelState, copied_buffers, same_random_numbers
from ortlaunch.ort.verify.trace import TraceWarning, location, statement_at, trace_warnings

FRESH_BATCHES = 2
"""Number of batches besides the traced one on which the graph is checked."""

_WIDER = 10.0
"""Factor between these tolerances and those of ``ortlaunch check``. An error on another batch must also exceed the
error on the traced batch by this factor to count."""

_TRIES = 5
"""Passes over the same batch with which random decisions are detected."""


@dataclass(frozen=True)
class Finding:
    """A difference between ONNX Runtime's results and PyTorch's."""

    kind: Allow
    what: str
    advice: str

    def refusal(self) -> str:
        """Returns the message that stops a run."""
        return (
            f"{self.what}. {self.advice}, use backend=eager or backend=compile, or accept it with "
            f"backend.allow=[{self.kind.value}] (ortlaunch check with the same configuration says more)"
        )


class QuickCheck:
    """Compares one worker's ORTModule with the plain model inside it."""

    def __init__(self, wrapped: torch.nn.Module, task: Task, precision: Context) -> None:
        """
        Args:
            wrapped: the ORTModule, before or after its first forward.
            task: how the model is called.
            precision: the context in which the run calls the model (autocast).
        """
        self._wrapped = wrapped
        self._task = task
        self._precision = precision
        self._warnings: list[TraceWarning] = []

    def findings(self, batches: list[Batch], warnings: Iterable[TraceWarning] = ()) -> list[Finding]:
        """Returns the problems; empty if there are none, or if the model fell back to PyTorch.

        Args:
            batches: on the model's device; the first one is used for the export.
            warnings: the tracer's warnings, if the model was already exported.
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
            # The model fell back to PyTorch (backend.fallback=warn), so there is nothing to compare.
            return []
        pair = Pair(self._wrapped, self._task, self._precision, state)
        outputs = self._output_finding(pair, batches)
        buffers = self._buffer_finding(pair, batches[-1], state)
        return [finding for finding in (buffers, outputs) if finding is not None]

    def _forward(self, batch: Batch) -> None:
        with self._precision():
            self._task.outputs(self._wrapped, batch)

    def _output_finding(self, pair: Pair, batches: list[Batch]) -> Finding | None:
        for batch in batches[1:]:
            gap = pair.gap(batch)
            if gap.exceeds(_WIDER * gap.tolerance):
                return self._explain(pair, gap, batches[0], batch)
        return None

    def _explain(self, pair: Pair, gap: Gap, traced: Batch, fresh: Batch) -> Finding | None:
        """Distinguishes a frozen branch from wrong outputs, and both from a model with random outputs."""
        if pair.is_random(traced):
            # Random outputs cannot be compared. Random decisions are frozen by the export nevertheless.
            places = pair.chance_decisions(traced, _TRIES) & {warning.place for warning in self._warnings}
            what = "what chance decides in PyTorch is decided once for all"
            return self._frozen(what, places) if places else None
        first = pair.gap(traced)
        if first.exceeds(_WIDER * first.tolerance) and not gap.exceeds(_WIDER * (first.error or 0.0)):
            return Finding(
                Allow.wrong_outputs,
                f"under ONNX Runtime the model's outputs are not PyTorch's ({first})",
                "Find the part of it that is exported wrongly",
            )
        places = changed_decisions(pair.eager(traced)[1], pair.eager(fresh)[1])
        return self._frozen(f"the outputs on other batches than the first are not PyTorch's ({gap})", places)

    def _frozen(self, what: str, places: Iterable[SourceLine]) -> Finding:
        warned = {warning.place for warning in self._warnings}
        likely = sorted(places, key=lambda place: (place not in warned, place))
        where = f"; see `{statement_at(*likely[0])}` at {location(likely[0])}" if likely else ""
        return Finding(
            Allow.frozen_branch,
            f"under ONNX Runtime {what}{where}",
            "Write it without looking at values from Python (torch.where)",
        )

    def _buffer_finding(self, pair: Pair, batch: Batch, state: ModelState) -> Finding | None:
        """Compares the buffers that PyTorch's passes changed, after another training forward under ONNX Runtime.

        The forward with the export does not count, because the export itself runs the model in PyTorch.
        """
        if not pair.moved:
            return None
        expected, dropped = pair.eager_buffers(batch)
        state.restore()
        self._forward(batch)
        actual = copied_buffers(session.plain_model(self._wrapped))
        wrong = sorted(pair.moved - state.moved_buffers())
        what = "moves with every batch in PyTorch and stays as it is under ONNX Runtime"
        if not wrong and not dropped:
            # If dropout affects the buffer, its values cannot be compared.
            gaps = {name: widest({name: actual[name]}, {name: expected[name]}) for name in sorted(pair.moved)}
            wrong = [name for name, gap in gaps.items() if gap.exceeds(_WIDER * gap.tolerance)]
            what = "gets other values under ONNX Runtime than in PyTorch"
        if not wrong:
            return None
        others = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return Finding(
            Allow.stale_buffers,
            f"the model's buffer {wrong[0]}{others} {what}, so evaluation would use statistics of no batch",
            "Take a layer without running statistics (GroupNorm, LayerNorm)",
        )
