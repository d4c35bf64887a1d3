"""PyTorch's own CPU kernels inside ONNX Runtime's graph, where ONNX Runtime's are slow.

ONNX Runtime executes the graph; its ATen operator hands single nodes to PyTorch, forward and backward. Its own CPU
kernels for training are slow: some run on one thread (FastGeluGrad, LayerNormalizationGrad, Dropout), attention is
taken apart into many small operators, matrix products are slower than PyTorch's. With these, results equal eager
PyTorch's mostly to the bit, dropout included, since it draws from PyTorch's generator. On CUDA ONNX Runtime's kernels
are the fast ones, so none of this applies there.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ortlaunch.ort import attention, operators, shapes

_OPSET = 17
_ATEN = ("ATen", "org.pytorch.aten")
_ATEN_OP = "org.pytorch.aten::ATen"
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_LAYER_NORM = "native_layer_norm"
_WRITTEN_OUT_GELU = ("NewGELUActivation", "FastGELUActivation")
DROPOUT = "ortlaunch::dropout"
"""What an ATen node that drops out calls."""
_GELU_TANH = "ortlaunch::gelu_tanh"
_LINEAR = "ortlaunch::linear"
_LINEAR_BIAS = "ortlaunch::linear_bias"
_CONV1D = "ortlaunch::conv1d"
_CROSS_ENTROPY = "ortlaunch::cross_entropy"


_enabled = False


def enable() -> None:
    """Has the exporter of this process use these kernels; after the construction of an ORTModule, which registers
    symbolics of its own."""
    from torch.onnx import register_custom_op_symbolic  # type: ignore[attr-defined]

    global _enabled
    _enabled = True
    for name, symbolic in _SYMBOLICS.items():
        register_custom_op_symbolic(name, symbolic, _OPSET)


def disable() -> None:
    """Takes `enable` back; before the construction of an ORTModule, which then registers its own symbolics."""
    from torch.onnx import unregister_custom_op_symbolic  # type: ignore[attr-defined]

    global _enabled
    if _enabled:
        _enabled = False
        for name in _SYMBOLICS:
            unregister_custom_op_symbolic(name, _OPSET)


def restore() -> None:
    """Repeats `enable`, where it is in force, after the construction of a further ORTModule."""
    if _enabled:
        enable()


def fuse_gelu(model: torch.nn.Module) -> None:
    """Replaces transformers' GELU written out in eight operations by the same function in one; it has no weights."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child).__name__ in _WRITTEN_OUT_GELU:
                setattr(module, name, torch.nn.GELU(approximate="tanh"))


def register_gradients() -> None:
    """Tells ORTModule how to differentiate the nodes that these kernels appear in; before it is constructed."""
    from onnxruntime.training.ortmodule._custom_gradient_registry import CustomGradientRegistry

    domain, operator = _ATEN[1], _ATEN[0]
    CustomGradientRegistry.register(domain, operator, (_ATTENTION, ""), _attention_gradient)
    CustomGradientRegistry.register(domain, operator, (_LAYER_NORM, ""), _layer_norm_gradient)
    CustomGradientRegistry.register(domain, operator, ("gelu", ""), _gelu_gradient)
    CustomGradientRegistry.register(domain, operator, (_GELU_TANH, ""), _gelu_tanh_gradient)
    CustomGradientRegistry.register(domain, operator, (DROPOUT, ""), _dropout_gradient)
    CustomGradientRegistry.register(domain, operator, (_LINEAR, ""), _linear_gradient)
    CustomGradientRegistry.register(domain, operator, (_LINEAR_BIAS, ""), _linear_bias_gradient)
    CustomGradientRegistry.register(domain, operator, (_CONV1D, ""), _conv1d_gradient)
    CustomGradientRegistry.register(domain, operator, (_CROSS_ENTROPY, ""), _cross_entropy_gradient)
    operators.define()
    shapes.register()


def _attention(
    g: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = None,
    is_causal: Any = None,
    scale: Any = None,
    enable_gqa: Any = None,
) -> Any:
    """Attention as one node where PyTorch's CPU kernel takes it.

    That is without dropout, with as many key as query heads, and with no gradient for the mask but one for the query,
    without which ONNX Runtime would ask for none of the others.
    """
    from torch.onnx import symbolic_helper

    dropout = symbolic_helper._maybe_get_const(dropout_p, "f")
    grouped = enable_gqa is not None and symbolic_helper._maybe_get_const(enable_gqa, "b")
    learnt_mask = not symbolic_helper._is_none(attn_mask) and attn_mask.requires_grad()
    if dropout or grouped or learnt_mask or not query.requires_grad():
        return attention.scaled_dot_product_attention(
            g, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, drop=_dropout
        )
    zero = g.op("Constant", value_t=_scalar(0.0))
    mask = _additive(g, attn_mask)
    if not symbolic_helper._is_none(scale):
        scale = g.op("Constant", value_t=_scalar(symbolic_helper._get_const(scale, "f", "scale")))
    output, _ = g.op(_ATEN_OP, query, key, value, zero, is_causal, mask, scale, operator_s=_ATTENTION, outputs=2)
    output.setType(query.type())
    return output


def _additive(g: Any, attn_mask: Any) -> Any:
    """The mask as the kernel wants it: added to the scores, minus infinity where a boolean one says no."""
    from torch.onnx import symbolic_helper

    if attn_mask is None or symbolic_helper._is_none(attn_mask):
        return _none(g)
    if attn_mask.type().scalarType() != "Bool":
        return attn_mask
    yes, no = (g.op("Constant", value_t=_scalar(value)) for value in (0.0, -math.inf))
    return g.op("Where", attn_mask, yes, no)


def _attention_gradient() -> list[Any]:
    return [
        (
            _ATEN,
            ["GO(0)", "I(0)", "I(1)", "I(2)", "O(0)", "O(1)", "I(3)", "I(4)", "I(5)", "I(6)"],
            ["GI(0)", "GI(1)", "GI(2)"],
            {"operator": {"value": f"{_ATTENTION}_backward", "dtype": "string"}},
        )
    ]


def _layer_norm(g: Any, values: Any, shape: Any, weight: Any, bias: Any, eps: Any, _cudnn_enable: Any = None) -> Any:
    from torch.onnx import symbolic_helper

    epsilon = g.op("Constant", value_t=_scalar(symbolic_helper._get_const(eps, "f", "eps")))
    output, _, _ = g.op(_ATEN_OP, values, shape, _none(g), _none(g), epsilon, operator_s=_LAYER_NORM, outputs=3)
    output.setType(values.type())
    if not symbolic_helper._is_none(weight):
        output = g.op("Mul", output, weight)
    if not symbolic_helper._is_none(bias):
        output = g.op("Add", output, bias)
    return output


def _layer_norm_gradient() -> list[Any]:
    return [
        ("Constant", [], ["OfValues"], {"value": {"value": [True, False, False], "dtype": "bool", "is_tensor": True}}),
        (
            _ATEN,
            ["GO(0)", "I(0)", "I(1)", "O(1)", "O(2)", "I(2)", "I(3)", "OfValues"],
            ["GI(0)", "", ""],
            {"operator": {"value": f"{_LAYER_NORM}_backward", "dtype": "string"}},
        ),
    ]


def _gelu(g: Any, values: Any, approximate: Any = None) -> Any:
    from torch.onnx import symbolic_helper

    kind = "none" if approximate is None else symbolic_helper._maybe_get_const(approximate, "s")
    operator = _GELU_TANH if kind == "tanh" else "gelu"
    inputs = [values] if kind == "tanh" else [values, _none(g)]
    output = g.op(_ATEN_OP, *inputs, operator_s=operator)
    output.setType(values.type())
    return output


def _gelu_gradient() -> list[Any]:
    return [(_ATEN, ["GO(0)", "I(0)", "I(1)"], ["GI(0)"], {"operator": {"value": "gelu_backward", "dtype": "string"}})]


def _gelu_tanh_gradient() -> list[Any]:
    return [(_ATEN, ["GO(0)", "I(0)"], ["GI(0)"], {"operator": {"value": f"{_GELU_TANH}_backward", "dtype": "string"}})]


def _dropout(g: Any, values: Any, p: Any, train: Any) -> Any:
    """Dropout as PyTorch does it on the CPU, from PyTorch's generator: its seed and saved states govern both alike."""
    from torch.onnx import symbolic_helper

    rate = symbolic_helper._get_const(p, "f", "p")
    if not rate or not symbolic_helper._get_const(train, "b", "train"):
        return values
    output, _ = g.op(_ATEN_OP, values, g.op("Constant", value_t=_scalar(rate)), operator_s=DROPOUT, outputs=2)
    output.setType(values.type())
    return output


def _dropout_gradient() -> list[Any]:
    return [("Mul", ["GO(0)", "O(1)"], ["GI(0)"])]


def _linear(g: Any, values: Any, weight: Any, bias: Any = None) -> Any:
    from torch.onnx import symbolic_helper, symbolic_opset9

    if not weight.requires_grad():
        # ONNX Runtime differentiates such a node only where the gradient of its first input is wanted.
        return symbolic_opset9.linear(g, values, weight, bias)
    has_bias = bias is not None and not symbolic_helper._is_none(bias)
    inputs = [weight, bias, values] if has_bias else [weight, values]
    return g.op(_ATEN_OP, *inputs, operator_s=_LINEAR_BIAS if has_bias else _LINEAR)


def _linear_gradient() -> list[Any]:
    return [_grad_weight("I(1)"), _node("ortlaunch::linear_grad_x", ["GO(0)", "I(0)"], ["GI(1)"])]


def _linear_bias_gradient() -> list[Any]:
    # A node for each input: ORT leaves out those of inputs that need no gradient.
    return [
        _grad_weight("I(2)"),
        _node("ortlaunch::grad_bias", ["GO(0)"], ["GI(1)"]),
        _node("ortlaunch::linear_grad_x", ["GO(0)", "I(0)"], ["GI(2)"]),
    ]


def _grad_weight(values: str) -> Any:
    return _node("ortlaunch::linear_grad_weight", ["GO(0)", values], ["GI(0)"])


def _addmm(g: Any, bias: Any, values: Any, weight: Any, beta: Any, alpha: Any) -> Any:
    """``addmm``, the form in which transformers' Conv1D is traced."""
    from torch.onnx import symbolic_helper, symbolic_opset9

    plain = all(symbolic_helper._maybe_get_const(scale, "f") == 1.0 for scale in (beta, alpha))
    if not plain or not bias.requires_grad():
        return symbolic_opset9.addmm(g, bias, values, weight, beta, alpha)
    return g.op(_ATEN_OP, bias, values, weight, operator_s=_CONV1D)


def _conv1d_gradient() -> list[Any]:
    return [
        _node("ortlaunch::grad_bias", ["GO(0)"], ["GI(0)"]),
        _node("ortlaunch::conv1d_grad_x", ["GO(0)", "I(2)"], ["GI(1)"]),
        _node("ortlaunch::conv1d_grad_weight", ["GO(0)", "I(1)"], ["GI(2)"]),
    ]


def _cross_entropy(
    g: Any, logits: Any, target: Any, weight: Any, reduction: Any, ignore_index: Any, label_smoothing: Any
) -> Any:
    """The mean over (rows, classes) without weights or smoothing; ORT's own in any other form."""
    from onnxruntime.training.ortmodule._custom_op_symbolic_registry import CustomOpSymbolicRegistry
    from torch.onnx import symbolic_helper

    usual = (
        symbolic_helper._is_none(weight)
        and symbolic_helper._maybe_get_const(reduction, "i") == operators.MEAN
        and symbolic_helper._maybe_get_const(label_smoothing, "f") == 0.0
        and symbolic_helper._get_tensor_rank(logits) == 2
        and target.type().scalarType() == "Long"
    )
    if not usual:
        original = CustomOpSymbolicRegistry._SYMBOLICS["::cross_entropy_loss"]
        return original(g, logits, target, weight, reduction, ignore_index, label_smoothing)
    loss, _, _ = g.op(_ATEN_OP, logits, target, ignore_index, operator_s=_CROSS_ENTROPY, outputs=3)
    loss.setType(logits.type().with_sizes([]))
    return loss


def _cross_entropy_gradient() -> list[Any]:
    return [_node(f"{_CROSS_ENTROPY}_backward", ["GO(0)", "O(1)", "O(2)", "I(1)", "I(2)"], ["GI(0)"])]


def _node(operator: str, inputs: list[str], outputs: list[str]) -> Any:
    return (_ATEN, inputs, outputs, {"operator": {"value": operator, "dtype": "string"}})


def _none(g: Any) -> Any:
    node = g.op("prim::Constant")
    node.setType(torch._C.OptionalType.ofTensor())
    return node


def _scalar(value: float) -> Any:
    return torch.tensor(value, dtype=torch.float32)


_SYMBOLICS = {
    "aten::scaled_dot_product_attention": _attention,
    "aten::layer_norm": _layer_norm,
    "aten::gelu": _gelu,
    "aten::dropout": _dropout,
    "aten::linear": _linear,
    "aten::addmm": _addmm,
    "aten::cross_entropy_loss": _cross_entropy,
}
