"""An ONNX symbolic for torch's ``scaled_dot_product_attention`` that suits training graphs.

torch's own symbolic is made for inference. Its Dropout has no mask output, so ONNX Runtime cannot build the gradient.
Rows whose mask hides every key become NaN in the backward pass. Grouped heads are not exported at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


def scaled_dot_product_attention(
    g: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    scale: Any = None,
    enable_gqa: Any = False,
    drop: Callable[[Any, Any, Any, Any], Any] | None = None,
) -> Any:
    """``softmax(query @ key^T * scale + mask) @ value``, with dropout on the weights.

    Args:
        g: the exporter's graph.
        query: [..., H, L, E].
        key: [..., H or fewer, S, E].
        value: [..., H or fewer, S, V].
        attn_mask: None, or a tensor that broadcasts to [..., H, L, S]: booleans (true means visible) or numbers to add.
        dropout_p: share of the weights to drop; each call draws anew.
        is_causal: whether to hide the keys after each query's position.
        scale: None for 1 / sqrt(E).
        enable_gqa: whether several heads of query share a head of key and value.
        drop: symbolic of ``aten::dropout`` to use; None uses ONNX's own Dropout.
    """
    from torch.onnx import symbolic_helper

    dropout = symbolic_helper._get_const(dropout_p, "f", "dropout_p")
    if symbolic_helper._get_const(enable_gqa, "b", "enable_gqa"):
        key, value = (_repeat_heads(g, shared, query) for shared in (key, value))
    axes = list(range(symbolic_helper._get_tensor_rank(key)))
    axes[-2:] = axes[:-3:-1]
    scores = g.op("MatMul", _scaled(g, query, scale), g.op("Transpose", key, perm_i=axes))
    mask = _causal(g, query, key) if symbolic_helper._get_const(is_causal, "b", "is_causal") else attn_mask
    seen = None
    if not symbolic_helper._is_none(mask):
        bias, seen = _bias(g, mask, query)
        scores = g.op("Add", scores, bias)
    weights = g.op("Softmax", scores, axis_i=-1)
    if dropout:
        weights = (drop or _drop)(g, weights, _constant(g, dropout), _constant(g, True))
    out = g.op("MatMul", weights, value)
    # A query that sees no key gets zeros. Hidden keys have a finite bias, so there is no NaN to remove, and this
    # product is far smaller than a selection over all weights.
    return out if seen is None or mask is not attn_mask else g.op("Mul", out, seen)


def _drop(g: Any, weights: Any, rate: Any, training: Any) -> Any:
    # ONNX Runtime builds the gradient from the second output.
    dropped, _ = g.op("Dropout", weights, rate, training, outputs=2)
    return dropped


def _scaled(g: Any, query: Any, scale: Any) -> Any:
    from torch.onnx import symbolic_helper

    if symbolic_helper._is_none(scale):
        size = known_size(query, -1)
        if size is None:
            root = g.op("Sqrt", _cast(g, _runtime_size(g, query, -1), query))
            return g.op("Div", query, root)
        factor: Any = 1.0 / math.sqrt(size)
    else:
        factor = symbolic_helper._maybe_get_const(scale, "f")
    if isinstance(factor, float):
        # A constant can be fused into the product after it.
        return g.op("Mul", query, _constant(g, factor, _dtype(query)))
    return g.op("Mul", query, _cast(g, factor, query))


def _bias(g: Any, mask: Any, query: Any) -> tuple[Any, Any]:
    """Returns what to add to the scores, and 1 for every query that sees a key and else 0, in the shape [..., L, 1]."""
    dtype = _dtype(query)
    hidden_bias = _constant(g, torch.finfo(dtype).min / 2, dtype)
    if _dtype(mask) == torch.bool:
        visible = mask
        bias = g.op("Where", mask, _constant(g, 0.0, dtype), hidden_bias)
    else:
        visible = g.op("Greater", mask, _constant(g, -math.inf, _dtype(mask)))
        # A key with the lowest number is seen where all others are hidden.
        lowest = _constant(g, torch.finfo(dtype).min / 4, dtype)
        seen = g.op("Where", g.op("Less", mask, lowest), lowest, mask)
        bias = g.op("Where", visible, seen, hidden_bias)
    return bias, g.op("ReduceMax", _cast(g, visible, query), axes_i=[-1], keepdims_i=1)


def _causal(g: Any, query: Any, key: Any) -> Any:
    """Returns booleans [L, S] that are true on and below the diagonal from the upper left corner."""
    places = []
    for tensor, axis in ((query, 1), (key, 0)):
        length = g.op("Gather", g.op("Shape", tensor), _constant(g, -2), axis_i=0)
        count = g.op("Range", _constant(g, 0), length, _constant(g, 1))
        places.append(g.op("Unsqueeze", count, _constant(g, [axis])))
    mask = g.op("GreaterOrEqual", *places)
    mask.setType(query.type().with_dtype(torch.bool).with_sizes([None, None]))
    return mask


def _repeat_heads(g: Any, tensor: Any, query: Any) -> Any:
    """Repeats the heads of [..., h, S, E] until they match those of `query`: [..., H, S, E]."""
    heads = _runtime_size(g, query, -3)
    times = g.op("Div", heads, _runtime_size(g, tensor, -3))
    shape = g.op("Shape", tensor)
    leading, trailing = _slice(g, shape, 0, -2), _slice(g, shape, -2, 2**63 - 1)
    spread = g.op("Concat", leading, times, trailing, axis_i=0)
    merged = g.op("Concat", _slice(g, shape, 0, -3), heads, trailing, axis_i=0)
    repeated = g.op("Reshape", g.op("Expand", g.op("Unsqueeze", tensor, _constant(g, [-3])), spread), merged)
    rank = tensor.type().dim()
    repeated.setType(tensor.type().with_sizes([None] * rank))
    return repeated


def _slice(g: Any, shape: Any, start: int, end: int) -> Any:
    return g.op("Slice", shape, _constant(g, [start]), _constant(g, [end]))


def _cast(g: Any, tensor: Any, like: Any) -> Any:
    from torch.onnx import _type_utils

    # CastLike would be simpler but has no gradient in ONNX Runtime.
    return g.op("Cast", tensor, to_i=_type_utils.JitScalarType.from_value(like).onnx_type())


def _constant(g: Any, value: Any, dtype: torch.dtype | None = None) -> Any:
    return g.op("Constant", value_t=torch.tensor(value, dtype=dtype))


def _runtime_size(g: Any, tensor: Any, axis: int) -> Any:
    """Returns the size as int64 [1], computed when the graph runs."""
    return g.op("Gather", g.op("Shape", tensor), _constant(g, [axis]), axis_i=0)


def known_size(tensor: Any, axis: int) -> int | None:
    """Returns the size of a traced tensor along an axis; None if it varies."""
    from torch.onnx import symbolic_helper

    size: int | None = symbolic_helper._get_tensor_dim_size(tensor, axis)
    return size


def _dtype(tensor: Any) -> torch.dtype:
    from torch.onnx import _type_utils

    dtype: torch.dtype = _type_utils.JitScalarType.from_value(tensor).dtype()
    return dtype
