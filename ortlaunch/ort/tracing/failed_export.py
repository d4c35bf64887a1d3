"""Finds the statement of the model at which torch's exporter fails; its own errors name an operator at best."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch

from ortlaunch.ort.source import location, place_in_stack, statement_at

_failed = ""


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Notes, until its end, the statement whose operator an export fails at."""
    global _failed
    _failed = ""
    exporter: Any = importlib.import_module("torch.onnx.utils")
    original = exporter._run_symbolic_function
    # The exporter of torch 2.6 calls the function by its name in the package.
    callers = [one for one in (exporter, torch.onnx) if hasattr(one, "_run_symbolic_function")]

    def _run_symbolic_function(graph: Any, block: Any, node: Any, *rest: Any, **options: Any) -> Any:
        global _failed
        try:
            return original(graph, block, node, *rest, **options)
        except Exception:
            place = place_in_stack(node.sourceRange())
            _failed = f"`{statement_at(*place)}` at {location(place)}" if place is not None else ""
            raise

    for caller in callers:
        setattr(caller, original.__name__, _run_symbolic_function)
    try:
        yield
        _failed = ""
    finally:
        for caller in callers:
            setattr(caller, original.__name__, original)


def take() -> str:
    """Returns the statement and its line, if the last export failed at one, and forgets it."""
    global _failed
    taken, _failed = _failed, ""
    return taken
