"""Exports transformers' Conv1D, a linear layer whose weight is transposed, as one node.

It is traced as a view as rows, ``addmm``, and a view as the shape before. The node takes what was there before the
first view, and where the second view gives the result the same leading sizes, nothing is left of the two. In a graph
each view would be a node, with up to eight others that compute its shape.
"""

from __future__ import annotations

from typing import Any

import torch

from ortlaunch.ort.kernels.sideways import source_of_size
from ortlaunch.ort.operators import exporter
from ortlaunch.ort.operators.aten_nodes import ATEN_OP
from ortlaunch.ort.operators.attention import known_size
from ortlaunch.ort.operators.traced import inputs_of, integers, is_vector, operator_called, places_of, size_of, widened

CONV1D = "ortlaunch::conv1d"
TRAINED = "ortlaunch::conv1d_trained"
"""The operator where all gradients are needed, and computed by one node."""


def symbolic(g: Any, bias: Any, values: Any, weight: Any, beta: Any, alpha: Any) -> Any:
    """Exports ``addmm``."""
    from torch.onnx import symbolic_helper

    width = known_size(weight, 1)
    is_plain = all(symbolic_helper._maybe_get_const(scale, "f") == 1.0 for scale in (beta, alpha))
    # The kernel sums the gradient of the bias over rows, which is only right for a vector. ONNX Runtime differentiates
    # such a node only if the gradient of its first input is needed.
    if not is_plain or not is_vector(bias, width) or not bias.requires_grad():
        return exporter.symbolic("aten::addmm")(g, bias, values, weight, beta, alpha)
    source = _before_rows(values)
    inputs = [bias, values if source is None else source, weight]
    operator = TRAINED if all(x.requires_grad() for x in inputs) else CONV1D
    output = g.op(ATEN_OP, *inputs, operator_s=operator)
    output.setType(widened(inputs[1], width))
    if source is None:
        return output
    rows = g.op("Reshape", output, g.op("Constant", value_t=torch.tensor([-1, width])))
    rows.setType(widened(values, width))
    return rows


def _before_rows(rows: Any) -> Any | None:
    """Returns x if the value is ``x.view(-1, x.size(-1))``."""
    inputs = inputs_of(rows, "onnx::Reshape")
    places = places_of(inputs[1]) if inputs else []
    rank = inputs[0].type().dim() if inputs else None
    if not inputs or not rank or len(places) != 2 or integers(places[0]) != [-1]:
        return None
    source = inputs[0]
    before, axis = source_of_size(source, rank - 1)
    is_last = size_of(places[1]) in [(source.debugName(), rank - 1), (before.debugName(), axis)]
    return source if is_last or integers(places[1]) == [known_size(source, rank - 1)] else None


def restored(rows: Any, shape: Any) -> Any | None:
    """Returns the result of a Conv1D before it was viewed as rows, if a view gives the rows that shape."""
    inputs = inputs_of(rows, "onnx::Reshape")
    result = inputs[0] if inputs else None
    if not inputs or result is None or operator_called(result.node()) not in (CONV1D, TRAINED):
        return None
    width, places = (integers(inputs[1]) or [])[-1:], places_of(shape)
    if integers(inputs[1]) != [-1, *width] or len(places) != result.type().dim() or integers(places[-1]) != width:
        return None
    is_own = all(_is_size(place, result, axis) for axis, place in enumerate(places[:-1]))
    return result if is_own else None


def _is_size(place: Any, result: Any, axis: int) -> bool:
    """Whether the value is the size of a Conv1D's result along an axis, which is that of what it was computed from."""
    values = result.node().inputsAt(1)
    source, same_axis = source_of_size(values, axis)
    same = [(result.debugName(), axis), (values.debugName(), axis), (source.debugName(), same_axis)]
    return size_of(place) in same
