"""``EmbeddingBag``, which PyTorch computes with its gradients, and ``Embedding``.

onnxruntime 1.19.2 aborts the process while it builds the gradient of the exporter's loop over the bags, and the
exporter knows no padding index. ONNX Runtime has no sparse tensors: with ``sparse=True`` the gradient has the same
values and is dense.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ortlaunch.ort.mends.torch_nodes import torch_node
from ortlaunch.ort.mends.values import sizes

_MODES = ("sum", "mean", "max")


def _shape(weight: list[Any], _per_sample: Any, _indices: Any, offsets: Any, _mode: Any, last: Any, *_: Any) -> Any:
    return [offsets[0] - 1 if last else offsets[0], weight[1]]


@torch_node(
    "Tensor weight, Tensor? per_sample_weights, Tensor indices, Tensor offsets, int mode, bool include_last_offset, "
    "bool scale_grad_by_freq, int padding_idx",
    differentiable=(0, 1),
    shape=_shape,
)
def _embedding_bag(
    weight: Tensor,
    per_sample_weights: Tensor | None,
    indices: Tensor,
    offsets: Tensor,
    mode: int,
    include_last_offset: bool,
    scale_grad_by_freq: bool,
    padding_idx: int,
) -> Tensor:
    return functional.embedding_bag(
        indices,
        weight,
        offsets,
        scale_grad_by_freq=scale_grad_by_freq,
        mode=_MODES[mode],
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=None if padding_idx < 0 else padding_idx,
    )


def register() -> None:
    """Registers the symbolic; call it after the constructor of an ORTModule, which registers its own."""
    from torch.onnx import register_custom_op_symbolic  # type: ignore[attr-defined]

    register_custom_op_symbolic("aten::embedding_bag", _symbolic, 17)
    register_custom_op_symbolic("aten::embedding", _embedding_symbolic, 17)


def _embedding_symbolic(g: Any, weight: Any, indices: Any, padding: Any, by_frequency: Any, sparse: Any) -> Any:
    from onnxruntime.training.ortmodule._custom_op_symbolic_registry import CustomOpSymbolicRegistry
    from torch.onnx import symbolic_helper

    if symbolic_helper._maybe_get_const(sparse, "b"):
        sparse = g.op("Constant", value_t=torch.tensor(False))
    return CustomOpSymbolicRegistry._SYMBOLICS["::embedding"](g, weight, indices, padding, by_frequency, sparse)


def _symbolic(
    g: Any,
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: Any,
    mode: Any,
    sparse: Any,
    per_sample_weights: Any,
    include_last_offset: Any,
    padding_idx: Any = None,
) -> Any:
    from torch.onnx import errors, symbolic_helper

    if any(output.uses() for output in list(g.original_node.outputs())[1:]):
        raise errors.SymbolicValueError("only the first result of embedding_bag is exported", weight)
    weights = None if symbolic_helper._is_none(per_sample_weights) else per_sample_weights
    padding = -1 if padding_idx is None or symbolic_helper._is_none(padding_idx) else padding_idx
    result = _embedding_bag(
        g,
        weight,
        weights,
        indices,
        offsets,
        mode,
        include_last_offset,
        scale_grad_by_freq,
        padding,
        dims=[None, sizes(weight)[1]],
    )
    return result, None, None, None
