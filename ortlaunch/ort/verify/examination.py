"""What a run's first batches show of a model under ONNX Runtime, computed when it is first asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import torch

from ortlaunch.models.task import Batch, Task
from ortlaunch.ort import session
from ortlaunch.ort.source import SourceLine, location, statement_at
from ortlaunch.ort.verify.gap import Gap
from ortlaunch.ort.verify.gradients import Errors, Gradients
from ortlaunch.ort.verify.moved_weights import moved_weights
from ortlaunch.ort.verify.pair import Context, Decisions, Pair, changed_decisions
from ortlaunch.ort.verify.python_state import PythonChange
from ortlaunch.ort.verify.state import ModelState
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
            state: of the plain model when it was exported.
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
        self._moves = True
        """Whether the last batch is compared with moved weights."""
        self.stale: set[str] = set()
        """Buffers that move in PyTorch and not under ONNX Runtime; known after `errors`."""

    @cached_property
    def strayed(self) -> tuple[Batch, Gap] | None:
        """The first batch, after that of the trace, with other outputs than PyTorch's; None where there is none."""
        found = self._first_stray()
        # What differs may be the random numbers.
        return self._first_stray() if found is not None and self._is_held else found

    def _first_stray(self) -> tuple[Batch, Gap] | None:
        strays = ((batch, self._stray(batch)) for batch in self.batches[1:])
        return next(((batch, gap) for batch, gap in strays if gap is not None), None)

    def _stray(self, batch: Batch) -> Gap | None:
        try:
            gap = self._gap(batch)
            if gap is None or not self._moves or not self._asks_otherwise(batch):
                return gap
        except Exception:
            if not self._moves:
                raise
        # PyTorch takes no other weights than the present ones, or asks about them, which each step watches.
        self._moves = False
        return self._gap(batch)

    def _gap(self, batch: Batch) -> Gap | None:
        """How far a batch's outputs are off; None where they are PyTorch's."""
        with self._at(batch):
            gap = self._pair.gap(batch)
            is_far = gap.exceeds(WIDER * gap.tolerance) and (self._draws or not self._pair.is_rounding(batch))
        return gap if is_far else None

    def _asks_otherwise(self, batch: Batch) -> bool:
        """Whether a truth that Python reads is another one with moved weights."""
        truths = []
        for self._moves in (False, True):
            read = self._decisions(batch)
            truths.append({place: [one for one in read[place] if one in ("True", "False")] for place in read})
        return truths[0] != truths[1]

    @contextlib.contextmanager
    def _at(self, batch: Batch) -> Iterator[None]:
        """Has passes over a batch go out from a state that the trace has not seen, as far as the batch is not its own.

        The buffers are those that PyTorch's passes over the batches before it leave. For the last batch the weights are
        moved as well.
        """
        number = next(number for number, one in enumerate(self.batches) if one is batch)
        outer, self._pair.state = self._pair.state, self._starts[number]
        moves = self._moves and number and number == len(self.batches) - 1
        try:
            with moved_weights(session.plain_model(self._wrapped)) if moves else contextlib.nullcontext():
                yield
        finally:
            self._pair.state = outer

    @cached_property
    def _starts(self) -> list[ModelState]:
        """The state from which PyTorch's pass over each batch goes out."""
        outer = self._pair.state
        starts = [outer]
        try:
            for batch in self.batches[:-1]:
                if not starts[1:] or starts[-1] is not outer:
                    self._pair.state = self._pair.state_after(batch)
                starts.append(self._pair.state)
        finally:
            self._pair.state = outer
        return starts

    @cached_property
    def is_random(self) -> bool:
        """Whether chance changes the outputs, dropout aside, in a way that prevents a comparison."""
        return self._draws and not self._is_held

    @cached_property
    def _draws(self) -> bool:
        with self._at(self.batches[0]):
            return self._pair.is_random(self.batches[0])

    @cached_property
    def _is_held(self) -> bool:
        """Whether the model draws random numbers, and later passes get the same ones in PyTorch and in the graph.

        A decision by chance would then be the same in each pass, so where there is one, passes stay random.
        """
        if not self._draws or self.decisions_by_chance():
            return False
        with self._at(self.batches[0]):
            return self._pair.hold_chance(self.batches[0])

    @cached_property
    def wrong_when_traced(self) -> Gap | None:
        """How far outputs that stray are off for the batch of the trace as well; None where they are right there."""
        if self.strayed is None:
            return None
        with self._at(self.batches[0]):
            first, other = self._pair.gap(self.batches[0]), self.strayed[1]
        is_wrong = first.exceeds(WIDER * first.tolerance) and not other.exceeds(WIDER * (first.error or 0.0))
        return first if is_wrong else None

    @cached_property
    def errors(self) -> Errors:
        """What is wrong with gradients and buffers on a batch that the model was not exported with."""
        gradients = self._gradients(self.batches[-1])
        _ = self.strayed  # Finding it shows whether weights can be moved.
        with self._at(self.batches[-1]):
            errors = gradients.errors(self.batches[-1], WIDER)
        self.stale = gradients.stale
        return errors

    def compute_gradients(self) -> None:
        """Computes ONNX Runtime's gradients of a model that cannot be compared; raises what that raises."""
        self._gradients(self.batches[-1]).compute(self.batches[-1])

    def _gradients(self, batch: Batch) -> Gradients:
        with self._at(batch):
            return Gradients(self._wrapped, self._task, self._precision, self._pair.state)

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
        return changed_decisions(self._decisions(self.batches[0]), self._decisions(batch))

    def where(self, places: Iterable[SourceLine]) -> str:
        """Points to the likeliest of some places; empty without any."""
        likely = sorted(places, key=lambda place: (place not in self.warned, place))
        return f"; see `{statement_at(*likely[0])}` at {location(likely[0])}" if likely else ""

    def _decisions(self, batch: Batch) -> Decisions:
        with self._at(batch):
            return self._pair.eager(batch)[1]
