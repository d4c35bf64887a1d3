"""Finds the statement of the model at which torch's exporter fails, and keeps those of the nodes that it makes.

The exporter's own errors name an operator at best, and those of ONNX Runtime a node.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from ortlaunch.ort.graph_nodes import nodes_of
from ortlaunch.ort.verify.trace import location, place_in_stack, statement_at

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


def with_lines(export: Callable[..., Any]) -> Callable[..., Any]:
    """Has an export write the model's line that a node comes from into its ``doc_string``, as a stack of one frame."""
    line = cache(_line)

    def exported(**arguments: Any) -> Any:
        with _whole_stacks():
            model, schema = export(**arguments)
        for node in nodes_of(model.graph):
            node.doc_string = line(node.doc_string)
        return model, schema

    return exported


@contextlib.contextmanager
def _whole_stacks() -> Iterator[None]:
    """Has torch write the stack of each node, which it leaves out unless it prints the whole graph."""
    graph: Any = torch._C.Graph
    original = graph._export_onnx
    strips = 5  # Its place among the arguments.
    graph._export_onnx = lambda *given: original(*given[: strips + 1], False, *given[strips + 2 :])
    try:
        yield
    finally:
        graph._export_onnx = original


def _line(stack: str) -> str:
    place = place_in_stack(stack)
    return f"{place[0]}({place[1]}): " if place is not None else ""
