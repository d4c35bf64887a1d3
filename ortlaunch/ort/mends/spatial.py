"""Pooling, normalization and embeddings in forms that PyTorch computes otherwise than a call of it would say."""

from __future__ import annotations

from typing import Any

import torch

from ortlaunch.ort.kernels.aten_nodes import none
from ortlaunch.ort.mends import torch_calls
from ortlaunch.ort.mends.values import number, sizes

_SPARSE = 5
"""The place of ``sparse`` among the arguments of ``embedding_bag``."""


def _instance_norm(g: Any, x: Any, weight: Any, bias: Any, mean: Any, var: Any, by_batch: Any, *rest: Any) -> Any:
    from torch.onnx import symbolic_helper

    if symbolic_helper._get_const(by_batch, "b", "use_input_stats"):
        # Its gradient fails on the CPU. Nothing moves the running statistics here.
        return torch_calls.exported(g, x, weight, bias, none(g), none(g), by_batch, *rest)
    # In an evaluation; training has written it out.
    scale, offset = (
        g.op("Expand", number(g, neutral, mean), g.op("Shape", mean)) if symbolic_helper._is_none(given) else given
        for given, neutral in ((weight, 1.0), (bias, 0.0))
    )
    small = symbolic_helper._get_const(rest[1], "f", "eps")
    return g.op("BatchNormalization", x, scale, offset, mean, var, epsilon_f=small).setType(x.type())


def _adaptive_avg_pool(g: Any, x: Any, size: Any) -> Any:
    from torch.onnx import symbolic_helper

    known = symbolic_helper._maybe_get_const(size, "is")
    if isinstance(known, list) and set(known) == {1} and x.type().scalarType() in ("Float", "Double"):
        # PyTorch, too, takes the mean here. A call of PyTorch takes longer than the operator, and computes twice.
        rank = len(sizes(x))
        return g.op("ReduceMean", x, axes_i=list(range(rank - len(known), rank)), keepdims_i=1)
    return torch_calls.exported(g, x, size)


def _embedding(g: Any, weight: Any, indices: Any, padding: Any, by_frequency: Any, sparse: Any) -> Any:
    """Exports ``embedding``; ONNX Runtime has no sparse tensors, and a dense gradient has the same values."""
    from onnxruntime.training.ortmodule._custom_op_symbolic_registry import CustomOpSymbolicRegistry

    return CustomOpSymbolicRegistry._SYMBOLICS["::embedding"](g, weight, indices, padding, by_frequency, _dense(g))


def _embedding_bag(
    g: Any, weight: Any, indices: Any, offsets: Any, scale: Any, mode: Any, _sparse: Any, *rest: Any
) -> Any:
    """Exports ``embedding_bag``; the exporter's loop over the bags ends the process, and it knows no padding index."""
    return torch_calls.exported(g, weight, indices, offsets, scale, mode, _dense(g), *rest)


def _dense(g: Any) -> Any:
    return g.op("Constant", value_t=torch.tensor(False))


SYMBOLICS = {
    "aten::instance_norm": _instance_norm,
    **{f"aten::adaptive_avg_pool{n}d": _adaptive_avg_pool for n in (1, 2, 3)},
    "aten::embedding": _embedding,
    "aten::embedding_bag": _embedding_bag,
}
