"""Refuses what ``torch.jit`` has compiled and a trace cannot take in: modules, and branches or loops with gradients.

A trace enters no compiled module. It takes in the operators of a compiled function, but ONNX Runtime has no gradient of
a branch or a loop, and looking for one ends the process with SIGABRT.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

import torch

from ortlaunch.ort.refusal import refusal
from ortlaunch.ort.source import location, statement_at
from ortlaunch.ort.tracing.passes import CannotExportError, over_graphs

_SOURCE = re.compile(r'File "(?P<file>.+?)", line (?P<line>\d+)')
"""Where the source of a compiled function says that a node is from."""
_ADVICE = "take it as it is before torch.jit, or use backend=eager or backend=compile"


def refuse_modules(model: torch.nn.Module) -> None:
    """Raises if a part of the model is a compiled module; the message names it."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise refusal(f"{name or 'the model'} is compiled by torch.jit, which ONNX Runtime cannot trace: {_ADVICE}")


def branches_refused() -> contextlib.AbstractContextManager[None]:
    """Raises until its end for a graph with a compiled branch or loop; the message names the statement."""
    return over_graphs(_refuse_branches)


def _refuse_branches(graph: Any) -> None:
    for node in graph.nodes():
        if node.kind() in ("prim::If", "prim::Loop") and _has_gradient(node):
            place = _SOURCE.search(node.sourceRange())
            line = (place["file"], int(place["line"])) if place else None
            where = f"`{statement_at(*line)}` at {location(line)}" if line else "forward"
            raise CannotExportError(
                f"{where} is a branch or a loop of a function that is compiled by torch.jit, of which ONNX Runtime "
                f"has no gradient: {_ADVICE}"
            )


def _has_gradient(node: Any) -> bool:
    values = [
        *node.inputs(),
        *(value for block in node.blocks() for inner in block.nodes() for value in inner.inputs()),
    ]
    # Of values inside the function the trace does not know it; they count as those with a gradient.
    return any(value.requires_grad() for value in values if value.type().kind() == "TensorType")
