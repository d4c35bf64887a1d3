"""The check at a run's start: what would go wrong in silence is found on the run's own first batches.

It works with the run's own ORTModule, so that nothing is exported twice: the first training forward makes the export
that the run needs anyway, and the exported graph, run once more with its dropout off, must give PyTorch's outputs for
batches that it was not traced with. Weights, buffers, gradients and random numbers are left as they were; ONNX
Runtime's own random numbers are not, so that the caller seeds them afterwards. The wrapper of the trainer (DDP,
DeepSpeed) is passed by: no hook of it is called.

Within a run tolerances are wide: what is looked for is another result, not another rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ortlaunch.config.schema import Allow
from ortlaunch.ort import session
from ortlaunch.ort.check.compare import relative_error, tolerance_of
from ortlaunch.ort.check.graph import TracedGraph
from ortlaunch.ort.check.nested import NamedTensors, named_tensors
from ortlaunch.ort.check.reference import Place, Reference
from ortlaunch.ort.check.state import ModelState, same_random_numbers
from ortlaunch.ort.check.trace import TraceWarning, location, statement_at, trace_warnings
from ortlaunch.trainer.task import Batch, Task

FRESH_BATCHES = 2
"""Batches that the graph is tried on, besides the one that it is traced with."""

_WIDER = 10.0
"""How much wider tolerances are than those of ``ortlaunch check``, and how much larger than the error on the batch of
the trace an error must be to mean another result."""

Context = Callable[[], contextlib.AbstractContextManager[Any]]


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


@dataclass(frozen=True)
class Gap:
    """The output that is furthest from PyTorch's."""

    name: str
    error: float | None
    """Relative error; None where it is no number, as for another shape."""
    tolerance: float

    def exceeds(self, least: float) -> bool:
        """Whether the error is larger than `least`."""
        return self.error is None or self.error > least


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
        self._plain = session.plain_model(wrapped)
        self._task = task
        self._precision = precision
        self._graph: TracedGraph | None = None
        self._warnings: list[TraceWarning] = []

    def findings(self, batches: list[Batch]) -> list[Finding]:
        """What is wrong; empty where nothing is, and where the model fell back to PyTorch.

        Args:
            batches: on the model's device; the first is the one to export with.
        """
        with same_random_numbers():
            state = ModelState(self._plain)
            try:
                self._export(batches[0])
                if not session.is_active(self._wrapped):
                    # It fell back to PyTorch (backend.fallback=warn): there is nothing to compare.
                    return []
                state.restore()
                self._graph = TracedGraph(self._wrapped)
                outputs = self._output_finding(batches)
                buffers = self._buffer_finding(batches[-1], state)
            finally:
                state.restore()
                self._graph = None
        return [finding for finding in (buffers, outputs) if finding is not None]

    def _export(self, batch: Batch) -> None:
        with trace_warnings() as found, self._precision():
            self._task.outputs(self._wrapped, batch)
        self._warnings = found

    def _output_finding(self, batches: list[Batch]) -> Finding | None:
        for batch in batches[1:]:
            gap = self._gap(batch)
            if gap.exceeds(_WIDER * gap.tolerance):
                return self._explain(gap, batches[0], batch)
        return None

    def _explain(self, gap: Gap, traced: Batch, fresh: Batch) -> Finding | None:
        """Tells a frozen branch from outputs that are wrong altogether, and both from a model that is random."""
        if self._is_random(traced):
            return self._random_branch(traced)
        first = self._gap(traced)
        if first.exceeds(_WIDER * first.tolerance) and not gap.exceeds(_WIDER * (first.error or 0.0)):
            return Finding(
                Allow.wrong_outputs,
                f"under ONNX Runtime the model's outputs are not PyTorch's ({_distance(first)})",
                "Find the part of it that is exported wrongly",
            )
        changed = self._changed_decisions(traced, fresh)
        return _frozen(f"the outputs on other batches than the first are not PyTorch's ({_distance(gap)})", changed)

    def _random_branch(self, batch: Batch) -> Finding | None:
        # Outputs that chance changes cannot be compared; decisions that it changes stay frozen all the same.
        changed = self._changed_decisions(batch, batch)
        traced = {warning.place for warning in self._warnings}
        drawn = [place for place in changed if place in traced]
        return _frozen("chance decides in PyTorch and no longer does under ONNX Runtime", drawn) if drawn else None

    def _buffer_finding(self, batch: Batch, state: ModelState) -> Finding | None:
        # By PyTorch's forward passes, which the outputs were compared with.
        moved = state.moved_buffers()
        if not moved:
            return None
        state.restore()
        with self._precision():
            self._task.outputs(self._wrapped, batch)
        stale = sorted(moved - state.moved_buffers())
        if not stale:
            return None
        others = f" and {len(stale) - 1} more" if len(stale) > 1 else ""
        return Finding(
            Allow.stale_buffers,
            f"the model's buffer {stale[0]}{others} moves with every batch in PyTorch and stays as it is under ONNX "
            "Runtime, so evaluation would use statistics of no batch",
            "Take a layer without running statistics (GroupNorm, LayerNorm)",
        )

    def _gap(self, batch: Batch) -> Gap:
        expected, _ = self._eager(batch)
        return widest(self._from_graph(batch), expected)

    def _is_random(self, batch: Batch) -> bool:
        """Whether the same batch gives other outputs, dropout aside, in PyTorch or in the graph."""
        for run in (lambda: self._eager(batch)[0], lambda: self._from_graph(batch)):
            first = run()
            torch.rand(1)
            gap = widest(run(), first)
            if gap.exceeds(gap.tolerance):
                return True
        return False

    def _changed_decisions(self, first: Batch, second: Batch) -> list[Place]:
        decisions = [self._eager(batch)[1] for batch in (first, *[second] * 4)]
        places = {place for one in decisions for place in one}
        changed = [place for place in places if any(one.get(place) != decisions[0].get(place) for one in decisions)]
        warned = {warning.place for warning in self._warnings}
        return sorted(changed, key=lambda place: (place not in warned, place))

    def _eager(self, batch: Batch) -> tuple[NamedTensors, dict[Place, list[str]]]:
        with torch.no_grad(), self._precision(), Reference() as reference:
            outputs = self._task.outputs(self._plain, batch)
        return named_tensors(outputs), dict(reference.decisions)

    def _from_graph(self, batch: Batch) -> NamedTensors:
        assert self._graph is not None
        return named_tensors(self._task.outputs(self._graph, batch))  # type: ignore[arg-type]


def widest(actual: NamedTensors, expected: NamedTensors) -> Gap:
    """The output with the largest error in units of its tolerance."""
    gaps = [
        Gap(
            name,
            relative_error(actual[name], tensor) if name in actual else None,
            tolerance_of(tensor),
        )
        for name, tensor in expected.items()
    ]
    if not gaps:
        return Gap("output", 0.0, 1.0)
    return max(gaps, key=lambda gap: float("inf") if gap.error is None else gap.error / max(gap.tolerance, 1e-12))


def _frozen(what: str, places: list[Place]) -> Finding:
    where = ""
    if places:
        where = f": the first batch decided for all of them at {location(places[0])}, `{statement_at(*places[0])}`"
    return Finding(
        Allow.frozen_branch,
        f"under ONNX Runtime {what}{where}",
        "Write it without looking at values from Python (torch.where)",
    )


def _distance(gap: Gap) -> str:
    if gap.error is None:
        return f"{gap.name} cannot even be compared"
    return f"{gap.name} by {gap.error:.2g} of its largest value"
