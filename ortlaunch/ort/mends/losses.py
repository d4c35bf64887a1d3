"""The forms of cross entropy that ORTModule 1.19.2 refuses, has no gradient for, dies of or computes otherwise.

PyTorch computes them.
"""

from __future__ import annotations

from typing import Any

import torch

from ortlaunch.ort.mends import torch_calls
from ortlaunch.ort.mends.values import number

_MEAN = 1
"""Of torch's numbers for reductions."""
_IGNORED = -100
"""torch's own value of ``ignore_index``."""


def register() -> None:
    """Registers the symbolic; call it after the constructor of an ORTModule, which registers its own."""
    from torch.onnx import register_custom_op_symbolic  # type: ignore[attr-defined]

    register_custom_op_symbolic("aten::cross_entropy_loss", cross_entropy, torch_calls.OPSET)


def cross_entropy(
    g: Any, logits: Any, target: Any, weight: Any, reduction: Any, ignore_index: Any, label_smoothing: Any
) -> Any:
    """Exports the mean cross entropy of a batch of classes as onnxruntime's operator, any other as a call of PyTorch.

    For a sample without a dimension of the batch, onnxruntime's kernel ends the process. With weights of the classes,
    with another reduction and for sequences it takes the loss of a target out of range for zero, and where all targets
    are ignored it returns zero instead of NaN.
    """
    from onnxruntime.training.ortmodule._custom_op_symbolic_registry import CustomOpSymbolicRegistry
    from torch.onnx import symbolic_helper

    is_smooth = symbolic_helper._maybe_get_const(label_smoothing, "f") != 0.0
    is_weighted = not symbolic_helper._is_none(weight)
    is_mean = symbolic_helper._maybe_get_const(reduction, "i") == _MEAN
    is_batch = symbolic_helper._get_tensor_rank(target) == 1
    is_index = target.type().scalarType() == "Long"
    if is_smooth or is_weighted or not is_mean or not is_batch or not is_index:
        if is_index and isinstance(symbolic_helper._maybe_get_const(ignore_index, "i"), torch._C.Value):
            target, ignore_index = _with_a_constant(g, target, ignore_index)
        return torch_calls.exported(g, logits, target, weight, reduction, ignore_index, label_smoothing)
    original = CustomOpSymbolicRegistry._SYMBOLICS["::cross_entropy_loss"]
    return original(g, logits, target, weight, reduction, ignore_index, label_smoothing)


def _with_a_constant(g: Any, target: Any, ignore_index: Any) -> tuple[Any, Any]:
    """Returns targets that ignore a constant index where the model ignores a computed one, and that index.

    A call takes constants beside its tensors. A target that is the constant already stays out of range.
    """
    constant = number(g, _IGNORED, target)
    outside = g.op("Where", g.op("Equal", target, constant), number(g, _IGNORED - 1, target), target)
    renamed = g.op("Where", g.op("Equal", target, ignore_index), constant, outside)
    renamed.setType(target.type())
    return renamed, g.op("Constant", value_t=torch.tensor(_IGNORED))
