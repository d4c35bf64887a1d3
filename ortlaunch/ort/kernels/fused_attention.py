"""Exports attention, with dropout, as one node that calls our own CPU kernel.

If query, key and value are parts of one projection, as in GPT-2, the kernel reads them from its output. If each is a
projection of its own, as in BERT and Llama, or a part of each head of one, as in GPT-NeoX, the kernel reads them before
they are transposed, and applies a rotary position embedding to query and key, or to the first numbers of each of their
heads. Splitting, transposing and rotating them as nodes of their own would copy each one several times in the forward
and the backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ortlaunch.ort.kernels.sideways import TURNED, part_size, sources, untransposed, whole
from ortlaunch.ort.operators import attention, exporter
from ortlaunch.ort.operators.aten_nodes import ATEN_OP, constant, none
from ortlaunch.ort.operators.traced import attribute, integers, operator_called, places_of, size_of

ATTENTION = "ortlaunch::attention"
PACKED = "ortlaunch::attention_packed"
SIDEWAYS = "ortlaunch::attention_sideways"
_KEEP_PLACES = {
    "ortlaunch::linear": 1,
    "ortlaunch::linear_bias": 2,
    "ortlaunch::linear_trained": 1,
    "ortlaunch::linear_bias_trained": 2,
    "ortlaunch::conv1d": 1,
    "ortlaunch::conv1d_trained": 1,
    "ortlaunch::layer_norm": 2,
    "ortlaunch::rms_norm": 1,
}
"""Operators whose result has the sizes of an input except for the last one, and the index of that input."""


def symbolic(
    g: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = None,
    is_causal: Any = None,
    scale: Any = None,
    enable_gqa: Any = None,
    *,
    drop: Any,
) -> Any:
    """Exports ``scaled_dot_product_attention`` as one node if our kernel supports it.

    Otherwise it becomes many nodes (`ort.operators.attention`).

    The kernel supports fp32, and slowly fp64, of rank 4, and computes no gradient for the mask. The query must need a
    gradient: without it, ONNX Runtime would ask for none of the others.

    Args:
        drop: symbolic of ``aten::dropout``, for the form with many nodes.
    """
    from torch.onnx import symbolic_helper

    mask = None if attn_mask is None or symbolic_helper._is_none(attn_mask) else attn_mask
    rate = symbolic_helper._maybe_get_const(dropout_p, "f")
    causal = symbolic_helper._maybe_get_const(is_causal, "b")
    factor = None if symbolic_helper._is_none(scale) else symbolic_helper._maybe_get_const(scale, "f")
    is_known = isinstance(rate, int | float) and (factor is None or isinstance(factor, int | float))
    if not is_known or not _takes(query, key, value, mask):
        return attention.scaled_dot_product_attention(
            g, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, drop=drop
        )
    rest = [
        constant(g, float(rate)),
        g.op("Constant", value_t=torch.tensor(bool(causal))),
        none(g) if factor is None else constant(g, float(factor)),
    ]
    mask = none(g) if mask is None else mask
    packed = _packed(query, key, value) if query.type().scalarType() == "Float" else None
    found = sources(g, query, key, value) if packed is None else None
    if packed is not None:
        inputs = [packed.tensor, mask, g.op("Constant", value_t=torch.tensor(packed.heads)), *rest]
        sideways, _, _ = g.op(ATEN_OP, *inputs, operator_s=PACKED, outputs=3)
    elif found is not None:
        rotation = [none(g) if x is None else x for x in (found.cosine, found.sine)]
        inputs = [found.query, found.key, found.value, *rotation, mask, *rest]
        sideways, _, _ = g.op(ATEN_OP, *inputs, operator_s=SIDEWAYS, outputs=3)
    else:
        output, _, _ = g.op(ATEN_OP, query, key, value, mask, *rest, operator_s=ATTENTION, outputs=3)
        output.setType(query.type().with_sizes([None] * 4))
        return output
    # [B, L, H, E]; sizes are known only when the graph runs.
    sideways.setType(query.type().with_sizes([None] * 4))
    output = g.op("Transpose", sideways, perm_i=TURNED)
    output.setType(query.type().with_sizes([None] * 4))
    return output


def transpose(g: Any, x: Any, one: Any, other: Any) -> Any:
    """Exports ``transpose``; nothing is left of one that undoes the transposition of our attention's result."""
    from torch.onnx import symbolic_helper

    sideways = _of_ours(x)
    if sideways is not None and {symbolic_helper._get_const(axis, "i", "dim") % 4 for axis in (one, other)} == {1, 2}:
        return sideways
    return exporter.symbolic("aten::transpose")(g, x, one, other)


def reshaped(x: Any, shape: Any) -> Any | None:
    """Returns x if it is our attention's result and has this shape.

    transformers 5 reshapes it so for the sake of models whose queries of one position it has packed.
    """
    sideways = _of_ours(x)
    return x if sideways is not None and _is_own_shape(sideways, places_of(shape)) else None


def _of_ours(x: Any) -> Any | None:
    """Returns the result [B, L, H, E] of our attention if x is its transposition."""
    source = untransposed(x)
    return source if source is not None and operator_called(source.node()) in (PACKED, SIDEWAYS) else None


def _is_own_shape(sideways: Any, places: list[Any]) -> bool:
    """Whether the places say ``[B, -1, L, E]``, by sizes of the result or of what it was computed from."""
    if len(places) != 4 or integers(places[1]) != [-1]:
        return False
    inputs = list(sideways.node().inputs())
    result = sideways.debugName()
    if operator_called(sideways.node()) == SIDEWAYS:
        query, value = inputs[0], inputs[2]
        lengths = [(result, 1), (query.debugName(), 1), (whole(query).debugName(), 1)]
        is_size = size_of(places[3]) in [(result, 3), (value.debugName(), 3)]
        is_size = is_size or integers(places[3]) == [part_size(value)]
        return size_of(places[0]) == (result, 0) and size_of(places[2]) in lengths and is_size
    names = {result, *(x.debugName() for x in _views_of_parts(inputs[0]))}
    return all(
        found is not None and found[0] in names and found[1] == axis
        for found, axis in zip((size_of(place) for place in (places[0], *places[2:])), (0, 1, 3), strict=True)
    )


def _views_of_parts(packed: Any) -> list[Any]:
    """Returns the tensors [B, L, H, E] that were made of the parts of [B, L, 3 * H * E]."""
    splits = [use.user for use in packed.uses() if use.user.kind() == "onnx::Split"]
    parts = [part for split in splits for part in split.outputs()]
    users = [use.user for part in parts for use in part.uses()]
    return [user.output() for user in users if user.kind() == "onnx::Reshape" and user.output().type().dim() == 4]


def _takes(query: Any, key: Any, value: Any, mask: Any) -> bool:
    tensors = (query, key, value)
    kind = query.type().scalarType()
    if kind not in ("Float", "Double") or any(x.type().scalarType() != kind or x.type().dim() != 4 for x in tensors):
        return False
    if mask is None or not query.requires_grad():
        return bool(query.requires_grad())
    return mask.type().scalarType() in ("Bool", kind) and not mask.requires_grad() and (mask.type().dim() or 9) <= 4


@dataclass
class _Packed:
    """A tensor [B, L, 3 * heads * E], and the number of heads in each third of its last dimension."""

    tensor: Any
    heads: int


def _packed(query: Any, key: Any, value: Any) -> _Packed | None:
    """Returns the tensor of which the three are consecutive parts, if there is one."""
    parts = [part for part in map(_before_turn, (query, key, value)) if part is not None]
    if len(parts) < 3:
        return None
    split = parts[0].tensor.node()
    if split.kind() != "onnx::Split" or attribute(split, "axis") not in (2, -1):
        return None
    widths = integers(split.inputsAt(1)) if split.inputsSize() == 2 else None
    names = [x.debugName() for x in split.outputs()]
    if widths is None or len(set(widths)) != 1 or names != [part.tensor.debugName() for part in parts]:
        return None
    first = parts[0]
    heads = first.heads or widths[0] // (first.size or 1)
    # One of the two sizes of each part is known, and the other follows from it.
    is_whole = all(
        (part.heads or heads) == heads and (part.size or widths[0] // heads) * heads == widths[0] for part in parts
    )
    return _Packed(split.inputsAt(0), heads) if is_whole else None


@dataclass
class _Part:
    """A tensor [B, L, H * E], with H or E or both if they are known."""

    tensor: Any
    heads: int | None
    size: int | None


def _before_turn(x: Any) -> _Part | None:
    """Returns the tensor [B, L, H * E] of which `x` is ``view(B, L, H, E).transpose(1, 2)``, if there is one."""
    view = untransposed(x)
    if view is None or view.node().kind() != "onnx::Reshape":
        return None
    source, shape = view.node().inputs()
    places = places_of(shape)
    if source.type().dim() != 3 or len(places) != 4 or not all(_is_size(places[axis], source, axis) for axis in (0, 1)):
        return None
    numbers = [(integers(place) or [-1])[0] for place in places[2:]]
    heads, size = (number if number > 0 else None for number in numbers)
    return _Part(source, heads, size) if heads or size else None


def _is_size(value: Any, tensor: Any, axis: int) -> bool:
    """Whether the value is ``tensor.shape[axis]`` in the exporter's form."""
    found = size_of(value)
    return found is not None and found[1] == axis and found[0] in _with_places_of(tensor)


def _with_places_of(tensor: Any) -> set[str]:
    """Returns names of tensors that have `tensor`'s sizes except for the last: its inputs, and their other results."""
    names = {tensor.debugName()}
    while (node := tensor.node()).kind() == "onnx::Split" or operator_called(node) in _KEEP_PLACES:
        if node.kind() == "onnx::Split" and attribute(node, "axis") not in (2, -1):
            break
        names |= {x.debugName() for x in node.outputs()}
        tensor = list(node.inputs())[_KEEP_PLACES.get(operator_called(node), 0)]
        names.add(tensor.debugName())
    return names
