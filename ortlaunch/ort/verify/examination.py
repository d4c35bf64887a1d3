"""What a run's first batches show of a model under ONNX Runtime, computed when it is first asked for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from ortlaunch.models.task import Batch, Task
from ortlaunch.ort import session
from ortlaunch.ort.verify.gap import Gap
from ortlaunch.ort.verify.gradients import Gradients
from ortlaunch.ort.verify.nested import NamedTensors
from ortlaunch.ort.verify.pair import Context, Pair, changed_decisions
from ortlaunch.ort.verify.python_state import PythonChange
from ortlaunch.ort.verify.reference import SourceLine
from ortlaunch.ort.verify.state import ModelState, copied_buffers
from ortlaunch.ort.verify.trace import TraceWarning

WIDER = 10.0
"""Factor between these tolerances and those of ``ortlaunch check``. An error on another batch must also exceed the
error on the traced batch by this factor to count."""

_TRIES = 5
"""Passes over the same batch with which random decisions are detected."""


class Examination:
    """One worker's ORTModule beside the plain model inside it, for the traps to look at."""

    def __init__(
        self,
        wrapped: torch.nn.Module,
        task: Task,
        precision: Context,
        state: ModelState,
        batches: Sequence[Batch],
        warnings: Sequence[TraceWarning],
    ) -> None:
        """
        Args:
            wrapped: the ORTModule, which has exported.
            task: how the model is called.
            precision: the context in which the run calls the model (autocast).
            state: of the plain model; every pass starts from it.
            batches: on the model's device; the first is the one that it was exported with.
            warnings: what was said while it was exported.
        """
        self.batches = batches
        self.warned = {warning.place for warning in warnings}
        """Places of which torch warned while it traced."""
        self._pair = Pair(wrapped, task, precision, state)
        self._wrapped = wrapped
        self._task = task
        self._precision = precision
        self._state = state

    @cached_property
    def strayed(self) -> tuple[Batch, Gap] | None:
        """The first batch, after that of the trace, with other outputs than PyTorch's; None where there is none."""
        found = self._first_stray()
        # What differs may be the random numbers.
        return self._first_stray() if found is not None and self._is_held else found

    def _first_stray(self) -> tuple[Batch, Gap] | None:
        for batch in self.batches[1:]:
            gap = self._pair.gap(batch)
            if gap.exceeds(WIDER * gap.tolerance) and (self._draws or not self._pair.is_rounding(batch)):
                return batch, gap
        return None

    @cached_property
    def is_random(self) -> bool:
        """Whether chance changes the outputs, dropout aside, in a way that prevents a comparison."""
        return self._draws and not self._is_held

    @cached_property
    def _draws(self) -> bool:
        return self._pair.is_random(self.batches[0])

    @cached_property
    def _is_held(self) -> bool:
        """Whether the model draws random numbers, and later passes get the same ones in PyTorch and in the graph.

        A decision by chance would then be the same in each pass, so where there is one, passes stay random.
        """
        return self._draws and not self.decisions_by_chance() and self._pair.hold_chance(self.batches[0])

    @cached_property
    def wrong_when_traced(self) -> Gap | None:
        """How far outputs that stray are off for the batch of the trace as well; None where they are right there."""
        if self.strayed is None:
            return None
        first, other = self._pair.gap(self.batches[0]), self.strayed[1]
        is_wrong = first.exceeds(WIDER * first.tolerance) and not other.exceeds(WIDER * (first.error or 0.0))
        return first if is_wrong else None

    @cached_property
    def gradient_error(self) -> str | None:
        """What is wrong with the gradients on a batch that the model was not exported with; None where nothing is."""
        return Gradients(self._wrapped, self._task, self._precision, self._state).error(self.batches[-1], WIDER)

    def compute_gradients(self) -> None:
        """Computes ONNX Runtime's gradients of a model that cannot be compared; raises what that raises."""
        Gradients(self._wrapped, self._task, self._precision, self._state).compute(self.batches[-1])

    @property
    def draws_elsewhere(self) -> bool:
        """Whether PyTorch's passes draw random numbers that are not torch's."""
        _ = self.strayed  # Finding it makes these passes.
        return self._pair.draws_elsewhere

    @cached_property
    def python_change(self) -> PythonChange | None:
        """A value of the model's Python code that each forward changes; None where there is none."""
        return self._pair.python_change(self.batches[-1], self.batches[0])

    @property
    def moved(self) -> set[str]:
        """Names of the buffers that PyTorch's passes have moved."""
        _ = self.strayed  # Finding it makes these passes.
        return self._pair.moved

    def decisions_by_chance(self) -> set[SourceLine]:
        """Places of which torch warned, and where the same batch leads to other values from one pass to the next."""
        return self._pair.chance_decisions(self.batches[0], _TRIES) & self.warned

    def decisions_that_differ(self, batch: Batch) -> set[SourceLine]:
        """Places where a batch leads to other values in Python than the batch of the trace."""
        return changed_decisions(self._pair.eager(self.batches[0])[1], self._pair.eager(batch)[1])

    def buffers_in_pytorch(self, batch: Batch) -> tuple[NamedTensors, bool]:
        """The buffers after one pass, and whether dropout would have been active in it."""
        return self._pair.eager_buffers(batch)

    def buffers_under_ort(self, batch: Batch) -> tuple[NamedTensors, set[str]]:
        """The buffers after one training forward more, and the names of those that it moved.

        The forward that exported does not count: the export itself is a pass in PyTorch.
        """
        self._state.restore()
        with self._precision():
            self._task.outputs(self._wrapped, batch)
        return copied_buffers(session.plain_model(self._wrapped)), self._state.moved_buffers()
