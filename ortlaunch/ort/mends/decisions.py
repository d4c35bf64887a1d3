"""Watches, in each step, the tensor values that a trace has turned into values of Python and so has frozen.

Such a tensor becomes a further output of the graph. What the graph computes for it in a step is compared with what it
was in the trace. On a GPU it is copied without waiting, and compared in the next step. A value that comes from
operators without an export is not watched; the check at the start compares what it leads to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ortlaunch.base.errors import RequestError
from ortlaunch.ort.verify import value_reads
from ortlaunch.ort.verify.trace import location, statement_at

_TOLERANCE = 1e-3
"""Relative difference up to which a floating-point value counts as the same."""

_TRUTH = ("__bool__", "is_nonzero", "equal", "allclose")
"""Reads of which only the truth counts."""

_enforced = False


@dataclass
class Decision:
    """One read of a tensor's value in the trace."""

    read: value_reads.ValueRead
    as_bool: bool
    """Only whether the value is zero was read."""
    frozen: Tensor
    """What was read, as fp64 on the CPU, of any shape."""
    varies: bool = False
    """It had other values on the first batches although the outputs agreed with PyTorch's: it decides nothing."""

    def differs(self, value: Tensor) -> bool:
        """Whether a step has computed another value."""
        if self.as_bool:
            return bool((value != 0).any() != (self.frozen != 0).any())
        if value.shape != self.frozen.shape:
            return True
        return not torch.allclose(value, self.frozen, rtol=_TOLERANCE, atol=0.0, equal_nan=True)

    def change(self, value: Tensor) -> str:
        """Says what was frozen and what it should be now."""
        now, then = (_said(x != 0 if self.as_bool else x) for x in (value, self.frozen))
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
    _copied: list[Tensor] = field(default_factory=list)
    """Values of the step before, on their way from a GPU."""

    def compare(self, values: Sequence[Tensor]) -> None:
        """Compares a step's values with the frozen ones.

        Raises:
            RequestError: one differs, after `enforce`.
        """
        if not self.all:
            return
        if values[0].is_cuda:
            # The copies were made a step ago, so nothing waits here.
            values, self._copied = self._copied, [x.detach().to("cpu", non_blocking=True) for x in values]
        for decision, value in zip(self.all, values, strict=False):
            if decision.varies or not decision.differs(value.detach().double()):
                continue
            if _enforced:
                raise RequestError(decision.change(value.detach().double()))
            decision.varies = True


def enforce() -> None:
    """Makes each change of a decision stop this process's training from now on."""
    global _enforced
    _enforced = True


@dataclass
class Reads:
    """The reads of one trace, in order."""

    places: list[value_reads.ValueRead] = field(default_factory=list)
    as_bool: list[bool] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    """What was read, for the graph to return."""
    _untraced: dict[int, Tensor] = field(default_factory=dict)

    def note(self, place: value_reads.ValueRead, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Adds a read; see `value_reads.Note`."""
        value = _value_of(name, args, kwargs)
        if value is not None:
            self.places.append(place)
            self.as_bool.append(name in _TRUTH)
            self.tensors.append(_output(value))
            if torch._C._get_value_trace(self.tensors[-1]).node().kind() == "prim::Constant":  # type: ignore[attr-defined]
                # torch reads it from C++ (`torch.tensor` of tensors), where nothing is traced.
                self._untraced[len(self.tensors) - 1] = value

    def finish(self) -> None:
        """Traces what could not be traced where it was read; call it at the end of the traced forward."""
        for index, value in self._untraced.items():
            self.tensors[index] = _output(value)

    def decisions(self) -> Decisions:
        """Returns what the trace has frozen; call it after the trace."""
        frozen = [tensor.detach().cpu().clone() for tensor in self.tensors]
        return Decisions([Decision(*one) for one in zip(self.places, self.as_bool, frozen, strict=True)])


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
