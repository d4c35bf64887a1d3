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
"""Batches that the graph is tried on, besides the one that it is traced with."""

_WIDER = 10.0
"""How much wider tolerances are than those of ``ortlaunch check``, and how much larger than the error on the batch of
the trace an error must be to mean another result."""

_TRIES = 5
"""Passes over the same batch that tell whether chance decides."""


@dataclass(frozen=True)
class Finding:
    """Something that the model computes differently under ONNX Runtime."""

    kind: Allow
    what: str
    advice: str

    def refusal(self) -> str:
        """The message that stops a run."""
        return (
            f"{self.what}. {self.advice}, use backend=eager or backend=compile, or accept it with "
            f"backend.allow=[{self.kind.value}] (ortlaunch check with the same configuration says more)"
        )


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
        """Tells a frozen branch from outputs that are wrong altogether, and both from a model that is random."""
        if pair.is_random(traced):
            # Outputs that chance changes cannot be compared; decisions that it changes are frozen all the same.
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
        """Buffers that PyTorch's passes moved, after one training forward more under ONNX Runtime.

        The forward that exported does not count: the export itself is a pass in PyTorch.
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
            # Where dropout changes what the buffer is computed from, values say nothing.
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
