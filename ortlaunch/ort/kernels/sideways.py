"""Finds what query, key and value of an attention were before they were transposed and rotated.

transformers' models project the hidden states, view the result as [B, L, H, E] and transpose it. Many then rotate query
and key by their positions: ``x * cos + rotate_half(x) * sin``. GPT-NeoX and Phi rotate only the first numbers of each
head, and GPT-NeoX transposes one projection [B, L, H, 3 * E] before it takes the three parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ortlaunch.ort.operators import exporter
from ortlaunch.ort.operators.attention import known_size
from ortlaunch.ort.operators.traced import (
    attribute,
    half_size_of,
    inputs_of,
    integers,
    places_of,
    size_of,
    without_casts,
)

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
    """[B or 1, L, R], as the sine, for the first R of the E numbers; None if nothing is rotated."""
    sine: Any | None


def sources(g: Any, query: Any, key: Any, value: Any) -> Sources | None:
    """Returns the tensors of which the three are transpositions, with or without a rotation, if there are such.

    For parts of a transposed tensor, nodes that take the same parts of the tensor itself are added to the graph.
    """
    of_query, of_key = _unrotated(query), _unrotated(key)
    cosine = sine = None
    if of_query is not None and of_key is not None:
        (query, cosine, sine), (key, *others) = of_query, of_key
        if [x.debugName() for x in others] != [cosine.debugName(), sine.debugName()]:
            return None
    if any(untransposed(whole(x)) is None for x in (query, key, value)):
        return None
    return Sources(_untransposed_part(g, query), _untransposed_part(g, key), _untransposed_part(g, value), cosine, sine)


def untransposed(x: Any) -> Any | None:
    """Returns the tensor [B, L, H, E] of which the value is the transposition, if it is one."""
    node = x.node()
    is_turned = node.kind() == "onnx::Transpose" and list(attribute(node, "perm")) == TURNED
    return node.inputsAt(0) if is_turned else None


def whole(part: Any) -> Any:
    """Returns the tensor of rank 4 of which the value is a part, split along the last axis, or the value itself."""
    node = part.node()
    is_part = node.kind() == "onnx::Split" and attribute(node, "axis") in (-1, 3) and node.inputsSize() == 2
    return node.inputsAt(0) if is_part and part.type().dim() == 4 else part


def part_size(part: Any) -> int | None:
    """Returns the last size of a part [B, H, L, E] if the split says it in constants, else None."""
    node = part.node()
    sizes = integers(node.inputsAt(1)) if whole(part) is not part else None
    return None if sizes is None else sizes[[x.debugName() for x in node.outputs()].index(part.debugName())]


def _untransposed_part(g: Any, x: Any) -> Any:
    """Returns the tensor of which x is the transposition, or the part of it of which x is the transposed part.

    The parts of a tensor come from one node.
    """
    source = whole(x).node().inputsAt(0)
    if whole(x) is x:
        return source
    split = x.node()
    sizes, names = split.inputsAt(1), [part.debugName() for part in split.outputs()]
    for use in source.uses():
        if use.user.kind() == "onnx::Split" and use.user.inputsAt(1).debugName() == sizes.debugName():
            parts = list(use.user.outputs())
            break
    else:
        parts = g.op("Split", source, sizes, axis_i=3, outputs=len(names))
        for part in parts:
            part.setType(x.type().with_sizes([None] * 4))
    return parts[names.index(x.debugName())]


def _unrotated(rotated: Any) -> tuple[Any, Any, Any] | None:
    """Returns x, cosine and sine if the value is x with its first numbers, or all of them, rotated."""
    pieces = inputs_of(rotated, "onnx::Concat")
    if not pieces or len(pieces) != 2 or attribute(without_casts(rotated).node(), "axis") not in (-1, 3):
        return _all_unrotated(rotated)
    found = _all_unrotated(pieces[0])
    return None if found is None else _joined(*found, pieces[1])


def _joined(part: Any, cosine: Any, sine: Any, rest: Any) -> tuple[Any, Any, Any] | None:
    """Returns x, cosine and sine if the part is ``x[..., :R]`` and the rest ``x[..., R:]`` with the R of the cosine."""
    first, second = inputs_of(part, "onnx::Slice"), inputs_of(rest, "onnx::Slice")
    if not first or not second or first[0].debugName() != second[0].debugName():
        return None
    if not all(len(x) >= 4 and _is_along_last(x) for x in (first, second)):
        return None
    begin, middle = first[1:3]
    is_rest = (integers(second[2]) or [0])[0] == _END and _is_one_place(middle, second[1])
    if integers(begin) != [0] or not is_rest or not _is_size_of(middle, cosine):
        return None
    return first[0], cosine, sine


def _is_along_last(slice_inputs: list[Any]) -> bool:
    """Whether a Slice of a tensor of rank 4 takes every number along the last dimension, from a place to another."""
    axes, steps = integers(slice_inputs[3]), integers(slice_inputs[4]) if len(slice_inputs) > 4 else [1]
    return axes in ([-1], [3]) and steps == [1]


def _is_one_place(one: Any, other: Any) -> bool:
    """Whether two ends of slices are one number."""
    constants = integers(one), integers(other)
    return constants[0] == constants[1] if constants[0] is not None else size_of(one) == size_of(other) is not None


def _is_size_of(place: Any, cosine: Any) -> bool:
    """Whether the end of a slice is the last size of the cosine.

    A number above one is, for what the slice is multiplied by has this size or one.
    """
    constant = integers(place)
    if constant is not None:
        return constant[0] > 1 and known_size(cosine, 2) in (None, constant[0])
    views = [use.user.output() for use in cosine.uses() if use.user.kind() == "onnx::Unsqueeze"]
    return size_of(place) in [(cosine.debugName(), 2), *((view.debugName(), 3) for view in views)]


def _all_unrotated(rotated: Any) -> tuple[Any, Any, Any] | None:
    """Returns x, cosine and sine if the value is ``x * cosine + rotate_half(x) * sine`` as in transformers."""
    summands = inputs_of(rotated, "onnx::Add")
    first, second = (inputs_of(x, "onnx::Mul") for x in summands) if summands else (None, None)
    if first is None or second is None:
        return None
    (x, cosine), (swapped, sine) = first, second
    factors = [_over_heads(factor, x) for factor in (cosine, sine)]
    return (x, *factors) if None not in factors and _is_rotated_half(swapped, x) else None


def _over_heads(factor: Any, x: Any) -> Any | None:
    """Returns the tensor [B or 1, L, R] that the factor [B or 1, 1, L, R] of x is made of."""
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
    if not _is_along_last(inputs):
        return False
    begin, end = inputs[1:3]
    if first:
        return integers(begin) == [0] and _is_middle(end, x)
    return _is_middle(begin, x) and (integers(end) or [0])[0] == _END


def _is_middle(value: Any, x: Any) -> bool:
    """Whether the value is half of the last size of x."""
    source, axis = source_of_size(x, 3)
    found, known = integers(value), known_size(x, 3)
    return half_size_of(value) == (source.debugName(), axis) if found is None else found == [(known or 0) // 2]


def size(g: Any, x: Any, dim: Any = None) -> Any:
    """Exports ``size`` as that of the tensor before a transposition or a rotation, which then need not be computed.

    The last size of a part is a constant if the split says so.
    """
    from torch.onnx import symbolic_helper

    axis = None if dim is None else symbolic_helper._maybe_get_const(dim, "i")
    rank = x.type().dim() if x.type().kind() == "TensorType" else None
    if not isinstance(axis, int) or not rank:
        return exporter.symbolic("aten::size")(g, x, *([] if dim is None else [dim]))
    source, place = source_of_size(x, axis % rank)
    number = part_size(source) if place == 3 else None
    if number is not None:
        return g.op("Constant", value_t=torch.tensor(number))
    return exporter.symbolic("aten::size")(g, source, g.op("Constant", value_t=torch.tensor(place)))


def source_of_size(x: Any, axis: int) -> tuple[Any, int]:
    """Returns a tensor and an axis of it with the size that `x` has along an axis."""
    while True:
        if x.node().kind() == "onnx::Transpose":
            x, axis = x.node().inputsAt(0), attribute(x.node(), "perm")[axis]
        elif axis > 0 and (rotated := _unrotated(x)) is not None:
            # The batch may be that of cosine and sine.
            x = rotated[0]
        elif axis < 3 and whole(x) is not x:
            x = whole(x)
        else:
            return x, axis


def constant_chunk(g: Any, x: Any, chunks: int, dim: int) -> Any:
    """Exports a ``chunk`` as a Split into parts of a constant size, where the view that made x says its size."""
    rank = x.type().dim()
    width = _viewed_size(x, dim % rank) if rank else None
    if width is None or width % chunks:
        return exporter.symbolic("prim::ConstantChunk")(g, x, chunks, dim)
    sizes = g.op("Constant", value_t=torch.tensor([width // chunks] * chunks))
    return g.op("Split", x, sizes, axis_i=dim % rank, outputs=chunks)


def _viewed_size(x: Any, axis: int) -> int | None:
    """Returns the size of x along an axis if it is a number in the view that made x, else None."""
    source, place = source_of_size(x, axis)
    shape = inputs_of(source, "onnx::Reshape")
    places = places_of(shape[1]) if shape else []
    found = integers(places[place]) if places and len(places) == source.type().dim() else None
    return found[0] if found and found[0] > 0 else None
