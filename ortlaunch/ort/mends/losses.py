"""The forms of cross entropy that ORTModule 1.19.2 refuses, has no gradient for, dies of or computes otherwise.

PyTorch computes them.
"""

from __future__ import annotations

from typing import Any

from ortlaunch.ort.mends import torch_calls

_MEAN = 1
"""Of torch's numbers for reductions."""


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
        return torch_calls.exported(g, logits, target, weight, reduction, ignore_index, label_smoothing)
    original = CustomOpSymbolicRegistry._SYMBOLICS["::cross_entropy_loss"]
    return original(g, logits, target, weight, reduction, ignore_index, label_smoothing)


SYMBOLICS = {"aten::cross_entropy_loss": cross_entropy}
