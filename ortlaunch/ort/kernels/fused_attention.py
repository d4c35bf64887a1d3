"""Exports attention, with dropout, as one node that calls our own CPU kernel.

If query, key and value are parts of one projection, as in GPT-2, the kernel reads them from its output. Splitting and
transposing them would copy each one in the forward and the backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ortlaunch.ort.kernels.aten_nodes import ATEN_OP, constant, none, step
from ortlaunch.ort.mends import attention

ATTENTION = "ortlaunch::attention"
PACKED = "ortlaunch::attention_packed"
_TURNED = [0, 2, 1, 3]
_KEEP_PLACES = {"ortlaunch::linear": 1, "ortlaunch::linear_bias": 2, "ortlaunch::layer_norm": 2}
"""Operators whose result has the sizes of an input except for the last one, and the index of that input."""
_LISTS = ("prim::ListConstruct", "onnx::Concat")
"""Operators that build a shape, before and after the exporter's conversion."""


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

    Otherwise it becomes many nodes (`ort.mends.attention`).

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
    if packed is None:
        output, _, _ = g.op(ATEN_OP, query, key, value, mask, *rest, operator_s=ATTENTION, outputs=3)
    else:
        inputs = [packed.tensor, mask, g.op("Constant", value_t=torch.tensor(packed.heads)), *rest]
        sideways, _, _ = g.op(ATEN_OP, *inputs, operator_s=PACKED, outputs=3)
        # [B, L, H, E]
        sideways.setType(query.node().inputsAt(0).type())
        output = g.op("Transpose", sideways, perm_i=_TURNED)
    # Sizes are known only when the graph runs.
    output.setType(query.type().with_sizes([None] * 4))
    return output


def gradient() -> list[Any]:
    """Returns the gradient of `ATTENTION`."""
    inputs = ["GO(0)", "I(0)", "I(1)", "I(2)", "O(0)", "O(1)", "O(2)", "I(3)", "I(4)", "I(5)", "I(6)"]
    return [step(f"{ATTENTION}_backward", inputs, ["GI(0)", "GI(1)", "GI(2)"])]


def packed_gradient() -> list[Any]:
    """Returns the gradient of `PACKED`."""
    inputs = ["GO(0)", "I(0)", "O(0)", "O(1)", "O(2)", "I(1)", "I(2)", "I(3)", "I(4)", "I(5)"]
    return [step(f"{PACKED}_backward", inputs, ["GI(0)"])]


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
    if split.kind() != "onnx::Split" or _get(split, "axis") not in (2, -1):
        return None
    widths = _constant(split.inputsAt(1)) if split.inputsSize() == 2 else None
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
    """Returns the tensor of which `x` is ``view(B, L, H, E).transpose(1, 2)``, if there is one."""
    turn = x.node()
    if turn.kind() != "onnx::Transpose" or list(_get(turn, "perm")) != _TURNED:
        return None
    reshape = turn.inputsAt(0).node()
    if reshape.kind() != "onnx::Reshape":
        return None
    source, shape = reshape.inputs()
    if source.type().dim() != 3 or shape.node().kind() not in _LISTS:
        return None
    places = list(shape.node().inputs())
    if len(places) != 4 or not all(_is_size(places[axis], source, axis) for axis in (0, 1)):
        return None
    numbers = [(_constant(place) or [-1])[0] for place in places[2:]]
    heads, size = (number if number > 0 else None for number in numbers)
    return _Part(source, heads, size) if heads or size else None


def _is_size(value: Any, tensor: Any, axis: int) -> bool:
    """Whether the value is ``tensor.shape[axis]`` in the exporter's form."""
    node = value.node()
    if node.kind() == "onnx::Unsqueeze":
        node = node.inputsAt(0).node()
    if node.kind() != "onnx::Gather":
        return False
    shape, index = node.inputs()
    if shape.node().kind() != "onnx::Shape" or _constant(index) != [axis]:
        return False
    return shape.node().inputsAt(0).debugName() in _with_places_of(tensor)


def _with_places_of(tensor: Any) -> set[str]:
    """Returns names of tensors that have `tensor`'s sizes except for the last: its inputs, and their other results."""
    names = {tensor.debugName()}
    while (node := tensor.node()).kind() == "onnx::Split" or _operator(node) in _KEEP_PLACES:
        if node.kind() == "onnx::Split" and _get(node, "axis") not in (2, -1):
            break
        names |= {x.debugName() for x in node.outputs()}
        tensor = list(node.inputs())[_KEEP_PLACES.get(_operator(node), 0)]
        names.add(tensor.debugName())
    return names


def _operator(node: Any) -> str:
    """Returns the operator that an ATen node calls; empty for any other node."""
    return str(_get(node, "operator")) if node.kind() == ATEN_OP else ""


def _constant(value: Any) -> list[int] | None:
    """Returns the integers of a constant; None for anything else."""
    node = value.node()
    if node.kind() == "onnx::Unsqueeze":
        node = node.inputsAt(0).node()
    return node.t("value").flatten().tolist() if node.kind() == "onnx::Constant" else None


def _get(node: Any, attribute: str) -> Any:
    """Returns the value of a node's attribute."""
    return getattr(node, node.kindOf(attribute))(attribute) if node.hasAttribute(attribute) else ()
