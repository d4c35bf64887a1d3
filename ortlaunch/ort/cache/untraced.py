"""Finds where a trace takes a tensor's values without a record of it, so that they become constants of the graph.

`value_reads` finds the tensors that become Python values. Here are those that become other tensors:
``torch.tensor(weight)`` and ``copy.deepcopy(weight)`` give the trace a tensor that it has never seen.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ortlaunch.ort.verify import value_reads
from ortlaunch.ort.verify.value_reads import ValueRead

_TAKING = (
    *((torch.Tensor, name) for name in ("untyped_storage", "storage", "__deepcopy__", "__dlpack__", "__reduce_ex__")),
    (torch.nn.Parameter, "__deepcopy__"),
    *((torch, name) for name in ("tensor", "as_tensor", "asarray", "scalar_tensor")),
)


@contextlib.contextmanager
def watch() -> Iterator[list[ValueRead]]:
    """Collects the lines where a trace takes values of tensors unseen, each once, in order."""
    reads: list[ValueRead] = []
    places: list[tuple[Any, str, bool, Any]] = []
    for owner, name in _TAKING:
        places.append((owner, name, name in vars(owner), getattr(owner, name)))
        setattr(owner, name, _watching(getattr(owner, name), reads))
    try:
        yield reads
    finally:
        for owner, name, was_its_own, original in reversed(places):
            if was_its_own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)


def _watching(original: Callable[..., Any], reads: list[ValueRead]) -> Callable[..., Any]:
    def take(*args: Any, **kwargs: Any) -> Any:
        _note((*args, *kwargs.values()), reads)
        return original(*args, **kwargs)

    return take


def _note(values: Any, reads: list[ValueRead]) -> None:
    if torch._C._get_tracing_state() is None:
        return
    for tensor in _tensors(values):
        if value_reads._depends_on_values(torch._C._get_value_trace(tensor)):  # type: ignore[attr-defined]
            place = _place()
            if place not in reads:
                reads.append(place)


def _place() -> ValueRead:
    """Returns the innermost line outside torch and ortlaunch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(("torch.", "ortlaunch.")):
        frame = frame.f_back
    return ValueRead(frame.f_code.co_filename, frame.f_lineno)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
