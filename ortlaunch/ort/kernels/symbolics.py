"""Replaces slow CPU kernels in ONNX Runtime's graph by PyTorch's and our own.

ONNX Runtime executes the graph, and its ATen operator calls operators of PyTorch for single nodes, forward and
backward. ONNX Runtime's own CPU kernels for training are slow: some run on one thread (FastGeluGrad,
LayerNormalizationGrad, Dropout), attention becomes many small operators, and matrix products are slower than PyTorch's.
PyTorch is not the fastest for everything: its dropout draws on one thread, and its attention with dropout also becomes
several operators. So matrix products are PyTorch's, and the operators between them are our own (``native/``). Dropout
takes its seeds from PyTorch's generator, so one seed governs both backends, but the dropped elements differ from
eager's. On CUDA ONNX Runtime's kernels are the fast ones, so nothing is replaced there.

An ATen node passes tensors, integers and floats but no strings, and returns no booleans. ORT computes the gradient of a
node only if that of its first input is needed, so weights come first.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ortlaunch.ort.kernels import conv1d, fused_attention, products, sideways
from ortlaunch.ort.operators import exporter, forms, shapes, standard
from ortlaunch.ort.operators.aten_nodes import ATEN_OP, constant, gradient, none, step
from ortlaunch.ort.operators.aten_nodes import register_gradients as register_node_gradients
from ortlaunch.ort.operators.attention import known_size
from ortlaunch.ort.operators.traced import is_vector, rank_of, widened

_OPSET = 17
_MEAN = 1
"""torch's code of the reduction to a mean."""
_LAYER_NORM = "native_layer_norm"
_WRITTEN_OUT_GELU = ("NewGELUActivation", "FastGELUActivation")
_DROPOUT = "ortlaunch::dropout"
RATES = {
    _DROPOUT: 1,
    fused_attention.ATTENTION: 4,
    fused_attention.PACKED: 3,
    fused_attention.SIDEWAYS: 6,
}
"""Operators with dropout, and the index of the input with its rate."""
_GELU = "ortlaunch::gelu"
_GELU_TANH = "ortlaunch::gelu_tanh"
_LINEAR = "ortlaunch::linear"
_LINEAR_BIAS = "ortlaunch::linear_bias"
_TRAINED = "_trained"
"""Ends the name of a linear layer's operator of which all gradients are needed, and computed by one node."""
_CROSS_ENTROPY = "ortlaunch::cross_entropy"
_AFFINE_LAYER_NORM = "ortlaunch::layer_norm"


_enabled = False


def enable() -> None:
    """Makes the exporter of this process use these kernels.

    Call it after the constructor of an ORTModule, which registers its own symbolics.
    """
    from torch.onnx import register_custom_op_symbolic  # type: ignore[attr-defined]

    global _enabled
    _enabled = True
    for name, symbolic in _SYMBOLICS.items():
        register_custom_op_symbolic(name, symbolic, _OPSET)


def disable() -> None:
    """Reverts `enable`. Call it before the constructor of an ORTModule, which then registers its own symbolics."""
    from torch.onnx import unregister_custom_op_symbolic  # type: ignore[attr-defined]

    global _enabled
    if _enabled:
        _enabled = False
        for name in _SYMBOLICS:
            unregister_custom_op_symbolic(name, _OPSET)


def restore() -> None:
    """Repeats `enable`, if it is in force, after the constructor of another ORTModule."""
    if _enabled:
        enable()


def fuse_gelu(model: torch.nn.Module) -> None:
    """Replaces transformers' GELU of eight operations by the same function as one operation; it has no weights."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child).__name__ in _WRITTEN_OUT_GELU:
                setattr(module, name, torch.nn.GELU(approximate="tanh"))


def register_gradients() -> None:
    """Registers the gradients of these nodes with ORTModule; call it before ORTModule's constructor."""
    register_node_gradients(_GRADIENTS)
    shapes.register()


def _attention(g: Any, *args: Any) -> Any:
    return fused_attention.symbolic(g, *args, drop=_dropout)


def _layer_norm(g: Any, values: Any, shape: Any, weight: Any, bias: Any, eps: Any, _cudnn_enable: Any = None) -> Any:
    from torch.onnx import symbolic_helper

    epsilon = constant(g, symbolic_helper._get_const(eps, "f", "eps"))
    needing = [x for x in (weight, bias, values) if not symbolic_helper._is_none(x) and x.requires_grad()]
    # The operator computes all three gradients.
    if len(needing) == 3:
        output, _, _ = g.op(ATEN_OP, weight, bias, values, epsilon, operator_s=_AFFINE_LAYER_NORM, outputs=3)
        output.setType(values.type())
        return output
    output, _, _ = g.op(ATEN_OP, values, shape, none(g), none(g), epsilon, operator_s=_LAYER_NORM, outputs=3)
    output.setType(values.type())
    if not symbolic_helper._is_none(weight):
        output = g.op("Mul", output, weight)
    if not symbolic_helper._is_none(bias):
        output = g.op("Add", output, bias)
    return output


def _gelu(g: Any, values: Any, approximate: Any = None) -> Any:
    from torch.onnx import symbolic_helper

    kind = "none" if approximate is None else symbolic_helper._maybe_get_const(approximate, "s")
    output = g.op(ATEN_OP, values, operator_s=_GELU_TANH if kind == "tanh" else _GELU)
    output.setType(values.type())
    return output


def _dropout(g: Any, values: Any, p: Any, train: Any) -> Any:
    """Exports dropout with a seed from PyTorch's generator, whose seed and saved states govern it."""
    from torch.onnx import symbolic_helper

    rate = symbolic_helper._get_const(p, "f", "p")
    if not rate or not symbolic_helper._get_const(train, "b", "train"):
        return values
    output, _ = g.op(ATEN_OP, values, constant(g, rate), operator_s=_DROPOUT, outputs=2)
    output.setType(values.type())
    return output


def _linear(g: Any, values: Any, weight: Any, bias: Any = None) -> Any:
    from torch.onnx import symbolic_helper

    has_bias = bias is not None and not symbolic_helper._is_none(bias)
    is_usual = (
        rank_of(weight) == 2
        and (rank_of(values) or 0) >= 2
        and (not has_bias or is_vector(bias, known_size(weight, 0)))
    )
    # ONNX Runtime differentiates such a node only if the gradient of its first input is needed.
    if not is_usual or not weight.requires_grad():
        return standard.linear(g, values, weight, bias)
    inputs = [weight, bias, values] if has_bias else [weight, values]
    operator = _LINEAR_BIAS if has_bias else _LINEAR
    if all(x.requires_grad() for x in inputs):
        operator += _TRAINED
    output = g.op(ATEN_OP, *inputs, operator_s=operator)
    output.setType(widened(values, known_size(weight, 0)))
    return output


def _reshape(g: Any, x: Any, shape: Any) -> Any:
    """Exports ``reshape`` and ``view``; nothing is left of one that gives a result of ours the shape that it has."""
    same = fused_attention.reshaped(x, shape)
    same = conv1d.restored(x, shape) if same is None else same
    return exporter.symbolic("aten::reshape")(g, x, shape) if same is None else same


def _cross_entropy(
    g: Any, logits: Any, target: Any, weight: Any, reduction: Any, ignore_index: Any, label_smoothing: Any
) -> Any:
    """Exports the mean over (rows, classes) without weights or smoothing by a kernel of ours."""
    from torch.onnx import symbolic_helper

    usual = (
        symbolic_helper._is_none(weight)
        and symbolic_helper._maybe_get_const(reduction, "i") == _MEAN
        and symbolic_helper._maybe_get_const(label_smoothing, "f") == 0.0
        and symbolic_helper._get_tensor_rank(logits) == 2
        and target.type().scalarType() == "Long"
    )
    if not usual:
        return forms.cross_entropy(g, logits, target, weight, reduction, ignore_index, label_smoothing)
    loss, _, _ = g.op(ATEN_OP, logits, target, ignore_index, operator_s=_CROSS_ENTROPY, outputs=3)
    loss.setType(logits.type().with_sizes([]))
    return loss


def _rms_norm(g: Any, values: Any, shape: Any, weight: Any, eps: Any) -> Any:
    from torch.onnx import _type_utils, symbolic_helper

    output = None
    if not symbolic_helper._is_none(weight):
        dtype = _type_utils.JitScalarType.from_value(values).dtype()
        is_given = not symbolic_helper._is_none(eps)
        epsilon = symbolic_helper._get_const(eps, "f", "eps") if is_given else torch.finfo(dtype).eps
        output = products.rms_norm(g, weight, values, epsilon)
    return standard.rms_norm(g, values, shape, weight, eps) if output is None else output


_SYMBOLICS = {
    "aten::scaled_dot_product_attention": _attention,
    "aten::layer_norm": _layer_norm,
    "aten::gelu": _gelu,
    "aten::sigmoid": partial(forms.called, products.SIGMOID),
    "aten::silu": partial(forms.called, products.SILU),
    "aten::dropout": _dropout,
    "aten::linear": _linear,
    "aten::addmm": conv1d.symbolic,
    "aten::cross_entropy_loss": _cross_entropy,
    "aten::mul": products.mul,
    "aten::rms_norm": _rms_norm,
    "aten::reshape": _reshape,
    "aten::size": sideways.size,
    "aten::transpose": fused_attention.transpose,
    "aten::view": _reshape,
    "prim::ConstantChunk": sideways.constant_chunk,
}

_GRADIENTS = {
    **{
        operator: gradient(operator, inputs, count)
        for operator, inputs, count in (
            (fused_attention.ATTENTION, "GO(0) I(0) I(1) I(2) O(0) O(1) O(2) I(3) I(4) I(5) I(6)", 3),
            (fused_attention.PACKED, "GO(0) I(0) O(0) O(1) O(2) I(1) I(2) I(3) I(4) I(5)", 1),
            (fused_attention.SIDEWAYS, "GO(0) I(0) I(1) I(2) O(0) O(1) O(2) I(3) I(4) I(5) I(6) I(7) I(8)", 3),
            (products.RMS_NORM, "GO(0) I(0) I(1) O(1)", 2),
            (products.SIGMOID, "GO(0) O(0)", 1),
            (products.SILU, "GO(0) I(0)", 1),
            (products.SILU_PRODUCT, "GO(0) I(0) I(1)", 2),
            (_AFFINE_LAYER_NORM, "GO(0) I(0) I(1) I(2) O(1) O(2)", 3),
            (_GELU, "GO(0) I(0)", 1),
            (_GELU_TANH, "GO(0) I(0)", 1),
            (_DROPOUT, "GO(0) O(1) I(1)", 1),
            (_LINEAR + _TRAINED, "GO(0) I(0) I(1)", 2),
            (_LINEAR_BIAS + _TRAINED, "GO(0) I(0) I(2)", 3),
            (conv1d.TRAINED, "GO(0) I(1) I(2)", 3),
            (_CROSS_ENTROPY, "GO(0) I(0) O(1) O(2) I(1) I(2)", 1),
        )
    },
    _LAYER_NORM: [
        ("Constant", [], ["OfValues"], {"value": {"value": [True, False, False], "dtype": "bool", "is_tensor": True}}),
        step(
            f"{_LAYER_NORM}_backward",
            ["GO(0)", "I(0)", "I(1)", "O(1)", "O(2)", "I(2)", "I(3)", "OfValues"],
            ["GI(0)", "", ""],
        ),
    ],
    # Each input has a node of its own, because ORT omits the nodes of inputs that need no gradient.
    _LINEAR: [
        step("ortlaunch::linear_grad_weight", ["GO(0)", "I(1)"], ["GI(0)"]),
        step("ortlaunch::linear_grad_x", ["GO(0)", "I(0)"], ["GI(1)"]),
    ],
    _LINEAR_BIAS: [
        step("ortlaunch::linear_grad_weight", ["GO(0)", "I(2)"], ["GI(0)"]),
        step("ortlaunch::grad_bias", ["GO(0)"], ["GI(1)"]),
        step("ortlaunch::linear_grad_x", ["GO(0)", "I(0)"], ["GI(2)"]),
    ],
    conv1d.CONV1D: [
        step("ortlaunch::grad_bias", ["GO(0)"], ["GI(0)"]),
        step("ortlaunch::conv1d_grad_x", ["GO(0)", "I(2)"], ["GI(1)"]),
        step("ortlaunch::conv1d_grad_weight", ["GO(0)", "I(1)"], ["GI(2)"]),
    ],
}


def rate_inputs() -> dict[str, int]:
    """Returns the operators with dropout and those of their gradients, with the index of the input with the rate."""
    found = dict(RATES)
    for name, index in RATES.items():
        for _, inputs, _, attributes in _GRADIENTS[name]:
            if f"I({index})" in inputs:
                found[attributes["operator"]["value"]] = inputs.index(f"I({index})")
    return found
