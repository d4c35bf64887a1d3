"""Finds where a traced model turns a tensor's value into a Python value, which the export freezes.

torch warns (``TracerWarning``) of every such place, but most are harmless: in a trace sizes are tensors too, and a
decision on a size is the same for every batch of that size. To distinguish them, the trace is followed backwards from
the tensor. If it leads to inputs, parameters or random numbers, the decision depends on values. If it leads only to
sizes, it does not.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

_CONVERSIONS = ("__bool__", "__int__", "__float__", "__complex__", "__index__", "__array__", "item", "tolist", "numpy")
_COMPARISONS = ("equal", "allclose", "is_nonzero")
_INPUTS = ("prim::Param", "prim::GetAttr")
_RANDOM = (
    *("rand", "bernoulli", "normal", "uniform", "multinomial", "exponential", "poisson", "dropout", "geometric"),
    *("binomial", "cauchy", "log_normal", "_standard_gamma", "_sample_dirichlet", "rrelu"),
)
_VALUES_MAKE_SIZES = ("nonzero", "masked_select", "unique", "bincount", "repeat_interleave", "argwhere", "histc")


@dataclass(frozen=True)
class ValueRead:
    """A line of the model's code that depends on the value of a tensor."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


Note = Callable[[ValueRead, str, tuple[Any, ...], dict[str, Any]], None]
"""Is told of a read: the line, the name of the conversion or comparison, and its arguments."""


@contextlib.contextmanager
def watch(note: Note | None = None) -> Iterator[list[ValueRead]]:
    """Collects the lines where a trace depends on tensors' values, each once, in order.

    Args:
        note: called at each such read, before it.
    """
    reads: list[ValueRead] = []
    originals: list[tuple[Any, str, bool, Any]] = []
    for owner, names in ((torch.Tensor, _CONVERSIONS + _COMPARISONS), (torch, _COMPARISONS)):
        for name in names:
            original = getattr(owner, name)
            originals.append((owner, name, name in vars(owner), original))
            setattr(owner, name, _watching(original, name, reads, note))
    try:
        yield reads
    finally:
        for owner, name, was_its_own, original in originals:
            if was_its_own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)


def _watching(original: Callable[..., Any], name: str, reads: list[ValueRead], note: Note | None) -> Callable[..., Any]:
    inside = False

    def read(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        # One of torch's modes that passes the read on makes it a second time.
        if inside or torch._C._get_tracing_state() is None:
            return original(*args, **kwargs)
        inside = True
        try:
            look(args, kwargs)
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                result = original(*args, **kwargs)
        finally:
            inside = False
        # The tracer's warning must name the line that reads the tensor, which is the caller of this function.
        caller = sys._getframe(1)
        for warning in heard:
            warnings.warn_explicit(warning.message, warning.category, caller.f_code.co_filename, caller.f_lineno)
        return result

    def look(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        traced = [torch._C._get_value_trace(tensor) for tensor in tensors]  # type: ignore[attr-defined]
        if any(_depends_on_values(value) for value in traced):
            place = _place()
            if place not in reads:
                reads.append(place)
            if note is not None:
                note(place, name, args, kwargs)

    return read


def is_chance_alone(value: torch.Tensor) -> bool:
    """Whether a traced tensor is computed from random numbers, and from no input or parameter."""
    sources = set(_sources(torch._C._get_value_trace(value)))  # type: ignore[attr-defined]
    return _CHANCE in sources and _VALUE not in sources


_VALUE, _CHANCE = "value", "chance"


def _depends_on_values(value: Any) -> bool:
    """Whether a traced value depends on inputs, parameters or random numbers other than by their sizes."""
    return next(_sources(value), None) is not None


def _sources(value: Any) -> Iterator[str]:
    """Yields, for each source on which a traced value depends other than by its size, what it is."""
    # Each node is visited at most twice: once for its value and once for its size.
    todo, seen = [(value.node(), False)], set()
    while todo:
        node, only_its_size = todo.pop()
        if (node, only_its_size) in seen:
            continue
        seen.add((node, only_its_size))
        kind = node.kind()
        operator = kind.partition("::")[2]
        if operator.startswith(_VALUES_MAKE_SIZES) or (operator == "index" and _by_mask(node)):
            yield _VALUE
        if not only_its_size and kind in _INPUTS:
            yield _VALUE
        if not only_its_size and operator.startswith(_RANDOM):
            yield _CHANCE
        sizes = only_its_size or kind == "aten::size"
        todo += [(argument.node(), sizes) for argument in node.inputs()]


def _by_mask(node: Any) -> bool:
    """Whether an ``aten::index`` selects elements with a boolean mask."""
    indices = list(node.inputs())[1].node().inputs()
    kinds = [index.type().scalarType() for index in indices if index.type().kind() == "TensorType"]
    # An index of unknown type could be a mask.
    return any(kind in ("Bool", "Byte", None) for kind in kinds)


def _place() -> ValueRead:
    """Returns the innermost line outside torch and this file."""
    frame = sys._getframe(1)
    place = frame
    while frame.f_back is not None:
        frame = frame.f_back
        name = frame.f_globals.get("__name__", "")
        if name != __name__ and not name.startswith("torch."):
            return ValueRead(frame.f_code.co_filename, frame.f_lineno)
    return ValueRead(place.f_code.co_filename, place.f_lineno)
