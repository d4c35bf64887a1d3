"""Finds what query, key and value of an attention were before they were transposed and rotated.

transformers' models project the hidden states, view the result as [B, L, H, E] and transpose it. Many then rotate query
and key by their positions: ``x * cos + rotate_half(x) * sin``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ortlaunch.ort.kernels.traced import attribute, half_size_of, inputs_of, integers, without_casts
from ortlaunch.ort.mends.attention import known_size

TURNED = [0, 2, 1, 3]
"""The permutation between [B, L, H, E] and [B, H, L, E]."""
_END = 2**63 - 1
"""What the exporter writes for the end of a slice that goes to the end."""


@dataclass
class Sources:
    """Query, key and value [B, L, H, E], before they are transposed, and the rotation of query and key."""

    query: Any
    key: Any
    value: Any
    cosine: Any | None
    """[B or 1, L, E], as the sine; None if nothing is rotated."""
    sine: Any | None


def sources(query: Any, key: Any, value: Any) -> Sources | None:
    """Returns the tensors of which the three are transpositions, with or without a rotation, if there are such."""
    beside = untransposed(value)
    if beside is None:
        return None
    of_query, of_key = _unrotated(query), _unrotated(key)
    cosine = sine = None
    if of_query is not None and of_key is not None:
        (query, cosine, sine), (key, *others) = of_query, of_key
        if [x.debugName() for x in others] != [cosine.debugName(), sine.debugName()]:
            return None
    query, key = untransposed(query), untransposed(key)
    return None if query is None or key is None else Sources(query, key, beside, cosine, sine)


def untransposed(x: Any) -> Any | None:
    """Returns the tensor [B, L, H, E] of which the value is the transposition, if it is one."""
    node = x.node()
    is_turned = node.kind() == "onnx::Transpose" and list(attribute(node, "perm")) == TURNED
    return node.inputsAt(0) if is_turned else None


def _unrotated(rotated: Any) -> tuple[Any, Any, Any] | None:
    """Returns x, cosine and sine if the value is ``x * cosine + rotate_half(x) * sine`` as in transformers."""
    summands = inputs_of(rotated, "onnx::Add")
    first, second = (inputs_of(x, "onnx::Mul") for x in summands) if summands else (None, None)
    if first is None or second is None:
        return None
    (x, cosine), (swapped, sine) = first, second
    factors = [_over_heads(factor, x) for factor in (cosine, sine)]
    return (x, *factors) if None not in factors and _is_rotated_half(swapped, x) else None


def _over_heads(factor: Any, x: Any) -> Any | None:
    """Returns the tensor [B or 1, L, E] that the factor [B or 1, 1, L, E] of x is made of."""
    inputs = inputs_of(factor, "onnx::Unsqueeze")
    if not inputs or len(inputs) != 2 or integers(inputs[1]) != [1]:
        return None
    tensor = inputs[0]
    is_alike = tensor.type().scalarType() == x.type().scalarType() and tensor.type().dim() == 3
    if not is_alike or tensor.requires_grad() or x.type().dim() != 4:
        return None
    sizes = {known_size(tensor, 2), known_size(x, 3)} - {None}
    return tensor if len(sizes) < 2 else None


def _is_rotated_half(swapped: Any, x: Any) -> bool:
    """Whether the first is ``cat((-x[..., half:], x[..., :half]), -1)``."""
    halves = inputs_of(swapped, "onnx::Concat")
    if not halves or len(halves) != 2 or attribute(without_casts(swapped).node(), "axis") not in (-1, 3):
        return False
    if (known_size(x, 3) or 0) % 2:
        return False
    negated = inputs_of(halves[0], "onnx::Neg")
    return negated is not None and _is_half(negated[0], x, first=False) and _is_half(halves[1], x, first=True)


def _is_half(part: Any, x: Any, *, first: bool) -> bool:
    """Whether the part is the first or the second half of x along the last dimension."""
    inputs = inputs_of(part, "onnx::Slice")
    if not inputs or len(inputs) < 4 or inputs[0].debugName() != x.debugName():
        return False
    axes, steps = integers(inputs[3]), integers(inputs[4]) if len(inputs) > 4 else [1]
    if axes not in ([-1], [3]) or steps != [1]:
        return False
    begin, end = inputs[1:3]
    if first:
        return integers(begin) == [0] and _is_middle(end, x)
    return _is_middle(begin, x) and (integers(end) or [0])[0] == _END


def _is_middle(value: Any, x: Any) -> bool:
    """Whether the value is half of the last size of x."""
    source, axis = _source_of_size(x, 3)
    found, known = integers(value), known_size(x, 3)
    return half_size_of(value) == (source.debugName(), axis) if found is None else found == [(known or 0) // 2]


def size(g: Any, x: Any, dim: Any = None) -> Any:
    """Exports ``size`` as that of the tensor before a transposition or a rotation, which then need not be computed."""
    from torch.onnx import symbolic_helper, symbolic_opset11

    axis = None if dim is None else symbolic_helper._maybe_get_const(dim, "i")
    rank = x.type().dim() if x.type().kind() == "TensorType" else None
    if not isinstance(axis, int) or not rank:
        return symbolic_opset11.size(g, x, *([] if dim is None else [dim]))
    source, place = _source_of_size(x, axis % rank)
    return symbolic_opset11.size(g, source, g.op("Constant", value_t=torch.tensor(place)))


def _source_of_size(x: Any, axis: int) -> tuple[Any, int]:
    """Returns a tensor and an axis of it with the size that `x` has along an axis."""
    while True:
        if x.node().kind() == "onnx::Transpose":
            x, axis = x.node().inputsAt(0), attribute(x.node(), "perm")[axis]
        elif axis > 0 and (rotated := _unrotated(x)) is not None:
            # The batch may be that of cosine and sine.
            x = rotated[0]
        else:
            return x, axis
