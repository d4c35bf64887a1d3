"""Watches, in each step, the tensor values that a trace has turned into values of Python and so has frozen.

Such a tensor becomes a further output of the graph. What the graph computes for it in a step is compared with what it
was in the trace. On a GPU it is copied without waiting, and compared in the next step. A value that comes from
operators without an export is not watched; the check at the start compares what it leads to.

A value may differ from batch to batch, or with a buffer, and decide nothing, for example one that is only logged. The
check at the start sees that: the values differ and the outputs agree with PyTorch's. A later one can still decide
something (`if length > 50`), so gradients and buffers of its batch are compared with PyTorch's unless an earlier
comparison stands for it.

The graph for evaluation is not made at the start, and few of its batches are compared with PyTorch. There each change
counts as such a number, and the loss of its batch is compared with PyTorch's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ortlaunch.base.counting import is_power_of_two
from ortlaunch.base.errors import RequestError
from ortlaunch.ort.source import location, statement_at
from ortlaunch.ort.tracing import value_reads

_TOLERANCE = 1e-3
"""Relative difference up to which a floating-point value counts as the same."""

_TRUTH = ("__bool__", "is_nonzero", "equal", "allclose")
"""Reads of which only the truth counts."""

_MOST_WHOLE = 32
"""Whole numbers of one decision that are compared one by one, because code may take remainders of them."""

_enforced = False
_unverified: list[tuple[Decision, Tensor]] = []
"""Values of the last micro-batch for which no comparison stands."""
_buffers: dict[str, Tensor] = {}
"""The buffers that this micro-batch has moved, as it found them."""
_met: list[tuple[Decision, Tensor]] | None = None
"""Values that a comparison with PyTorch meets; None outside of one."""
_unverified_in_evaluation: list[tuple[Decision, Tensor]] = []
"""The same of the last batches that were evaluated."""


@dataclass
class Decision:
    """One read of a tensor's value in the trace."""

    read: value_reads.ValueRead
    as_bool: bool
    """Only whether the value is zero was read."""
    frozen: Tensor
    """What was read, as fp64 on the CPU, of any shape."""
    is_whole: bool = False
    """What was read are whole numbers or truths."""
    by_chance: bool = False
    """It depends on random numbers alone, so that no comparison of a batch's results stands for another."""
    varies: bool = False
    """It had another value while the run started, and the run was not refused."""
    verified: list[Tensor] = field(default_factory=list)
    """Other values with which gradients and buffers agreed with PyTorch's, as fp64 on the CPU."""
    times: int = 0
    """How often steps of training have met another value."""

    def differs(self, value: Tensor) -> bool:
        """Whether a step has computed another value."""
        if self.as_bool:
            return bool((value != 0).any() != (self.frozen != 0).any())
        if value.shape != self.frozen.shape:
            return True
        return not torch.allclose(value, self.frozen, rtol=_TOLERANCE, atol=0.0, equal_nan=True)

    def stands_for(self, value: Tensor) -> bool:
        """Whether earlier comparisons show that this value decides nothing.

        A number between two that were compared is on the same side of every bound as one of them and the other. Whole
        numbers are compared one by one, until there were many. What a truth decides may matter only sometimes, so it is
        compared when it has come the first, second, fourth time and so on.
        """
        if self.as_bool:
            return bool(self.verified) and not is_power_of_two(self.times)
        return self.stands_for_number(value)

    def stands_for_number(self, value: Tensor) -> bool:
        """As `stands_for`, for what was read as a number."""
        known = [self.frozen, *self.verified]
        if any(torch.equal(value, one) for one in known):
            return True
        if any(value.shape != one.shape for one in known):
            return False
        if len(self.verified) >= _MOST_WHOLE and value.numel() > 1:
            # Of many numbers, one is the largest so far in nearly every step.
            return True
        if self.is_whole and len(self.verified) < _MOST_WHOLE:
            return False
        all_known = torch.stack(known)
        return bool(((all_known.amin(0) <= value) & (value <= all_known.amax(0))).all())

    def change(self, value: Tensor) -> str:
        """Says what was frozen and what it should be now."""
        kind = torch.bool if self.as_bool else torch.int64 if self.is_whole else torch.float64
        now, then = (_said(x.to(kind)) for x in (value, self.frozen))
        place = (self.read.file, self.read.line)
        return (
            f"`{statement_at(*place)}` at {location(place)} reads {now} in this step, and the graph that ONNX Runtime "
            f"trains was traced with {then}: write it without looking at values from Python (torch.where), use "
            "backend=eager or backend=compile, or accept it with backend.allow=[frozen_branch]"
        )


@dataclass
class Decisions:
    """The decisions of a graph, whose values follow its other outputs in this order."""

    all: list[Decision] = field(default_factory=list)
    evaluates: bool = False
    """The graph is one for evaluation."""
    _copied: list[Tensor] = field(default_factory=list)
    """Values of the step before, on their way from a GPU."""

    def compare(self, values: Sequence[Tensor]) -> bool:
        """Compares a step's values with the frozen ones.

        Returns:
            Whether there are unverified ones, which need the buffers of before the step: see `keep`.

        Raises:
            RequestError: one differs, after `enforce`, and has not differed before.
        """
        if not self.all:
            return False
        if self.evaluates:
            self._compare_in_evaluation(values)
            return False
        if values[0].is_cuda and _met is None:
            # The copies were made a step ago, so nothing waits here.
            values, self._copied = self._copied, [x.detach().to("cpu", non_blocking=True) for x in values]
        for decision, read in zip(self.all, values, strict=False):
            value = read.detach().double().cpu()
            if not decision.differs(value):
                continue
            if not _enforced:
                decision.varies |= not decision.by_chance
            elif not decision.varies:
                raise RequestError(decision.change(value))
            if _met is not None:
                _met.append((decision, value.clone()))
            elif _enforced:
                decision.times += 1
                if not decision.stands_for(value):
                    _unverified.append((decision, value.clone()))
        return _met is None and bool(_unverified)

    def _compare_in_evaluation(self, values: Sequence[Tensor]) -> None:
        for decision, read in zip(self.all, values, strict=False):
            value = read.detach().double().cpu()
            # A truth has no values between those that were compared.
            known = decision.as_bool and bool(decision.verified)
            if _enforced and decision.differs(value) and not known and not decision.stands_for_number(value):
                _unverified_in_evaluation.append((decision, value.clone()))


def enforce() -> None:
    """Makes each change of a decision stop this process's training from now on."""
    global _enforced
    _enforced = True


@contextlib.contextmanager
def as_at_start() -> Iterator[None]:
    """Within it, changes stop nothing and are noted, as before `enforce`."""
    global _enforced
    before, _enforced = _enforced, False
    try:
        yield
    finally:
        _enforced = before


def keep(before: dict[str, Tensor]) -> None:
    """Keeps the buffers from which the last micro-batch went out."""
    global _buffers
    _buffers = before


@contextlib.contextmanager
def not_noted() -> Iterator[list[tuple[Decision, Tensor]]]:
    """Has no step compare the values that a comparison with PyTorch meets; yields those of training for `verify`."""
    global _met
    outer, in_evaluation = _met, list(_unverified_in_evaluation)
    _met = []
    try:
        yield _met
    finally:
        _met = outer
        _unverified_in_evaluation[:] = in_evaluation


def verify(met: Sequence[tuple[Decision, Tensor]]) -> None:
    """Notes values with which a comparison of gradients and buffers has ended well."""
    for decision, value in met:
        if not any(torch.equal(value, one) for one in decision.verified):
            decision.verified.append(value)


def take_unverified_in_evaluation() -> list[tuple[Decision, Tensor]]:
    """Returns the decisions that differ in the batches evaluated since the last call, with the values."""
    taken = list(_unverified_in_evaluation)
    _unverified_in_evaluation.clear()
    return taken


def take_unverified() -> tuple[list[tuple[Decision, Tensor]], dict[str, Tensor]]:
    """Returns the decisions whose values in the last micro-batch need a comparison, with the values, and forgets them.

    On a GPU these are the values of the micro-batch before the last.

    Returns:
        The decisions, and the buffers that the last micro-batch has moved as it found them.
    """
    global _buffers
    taken, before = list(_unverified), _buffers
    _unverified.clear()
    _buffers = {}
    return taken, before


@dataclass
class Reads:
    """The reads of one trace, in order."""

    places: list[value_reads.ValueRead] = field(default_factory=list)
    as_bool: list[bool] = field(default_factory=list)
    is_whole: list[bool] = field(default_factory=list)
    by_chance: list[bool] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    """What was read, for the graph to return."""
    _untraced: dict[int, Tensor] = field(default_factory=dict)

    def note(self, place: value_reads.ValueRead, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Adds a read; see `value_reads.Note`."""
        value = _value_of(name, args, kwargs)
        if value is not None:
            self.places.append(place)
            self.as_bool.append(name in _TRUTH)
            self.is_whole.append(not value.is_floating_point())
            self.by_chance.append(value_reads.is_chance_alone(value))
            self.tensors.append(_output(value))
            if torch._C._get_value_trace(self.tensors[-1]).node().kind() == "prim::Constant":  # type: ignore[attr-defined]
                # torch reads it from C++ (`torch.tensor` of tensors), where nothing is traced.
                self._untraced[len(self.tensors) - 1] = value

    def finish(self) -> None:
        """Traces what could not be traced where it was read; call it at the end of the traced forward."""
        for index, value in self._untraced.items():
            self.tensors[index] = _output(value)

    def decisions(self, *, evaluates: bool) -> Decisions:
        """Returns what the trace has frozen; call it after the trace.

        Args:
            evaluates: whether the graph is one for evaluation.
        """
        frozen = [tensor.detach().cpu().clone() for tensor in self.tensors]
        facts = zip(self.places, self.as_bool, frozen, self.is_whole, self.by_chance, strict=True)
        return Decisions([Decision(*one) for one in facts], evaluates)


@contextlib.contextmanager
def collected(is_wanted: bool) -> Iterator[Reads]:
    """Collects, while a model is traced, the tensors whose values Python reads; none if they are not wanted."""
    reads = Reads()
    with value_reads.watch(reads.note) if is_wanted else contextlib.nullcontext():
        yield reads
        reads.finish()


def _output(value: Tensor) -> Tensor:
    # A sum is an operator of its own also where the tensor is an input of the graph.
    return value.detach().to(torch.float64) + 0.0


def _value_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Returns the tensor whose value is read; None where it cannot be returned by a graph."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if any(tensor.is_complex() for tensor in tensors):
        return None
    if name == "equal" and len(tensors) == 2 and tensors[0].shape == tensors[1].shape:
        return (tensors[0] == tensors[1]).all()
    if name == "allclose":
        difference, size = (tensors[0] - tensors[1]).abs(), tensors[1].abs()
        return (difference <= kwargs.get("atol", 1e-8) + kwargs.get("rtol", 1e-5) * size).all()
    return tensors[0] if len(tensors) == 1 else None


def _said(value: Tensor) -> str:
    text = str(value.tolist())
    return text if len(text) <= 40 else f"{text[:37]}..."
