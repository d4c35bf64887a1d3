"""Operators that PyTorch computes in a form that a call of it would not say.

- ``index_put``: a value that is broadcast, or what a mask assigns, fails when it is computed; so does what is assigned
  behind dimensions that are taken whole (``x[..., [0, 3]]``). Of several values for one place, one is added.
- ``sigmoid`` and ``silu``: the kernel for fp32 takes what is below -18 for -18, and its error is 6e-8 at any size. So
  ``sigmoid(x) / sigmoid(x).sum()`` and ``log(sigmoid(x))`` were wrong for x < -10, and infinite for x < -18.
- The forms of cross entropy that ORTModule refuses, has no gradient for, dies of or computes otherwise.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ortlaunch.ort.operators import exporter, shapes, torch_calls
from ortlaunch.ort.operators.aten_nodes import ATEN_OP, gradient, none
from ortlaunch.ort.operators.aten_nodes import register_gradients as register_node_gradients
from ortlaunch.ort.operators.torch_nodes import torch_node
from ortlaunch.ort.operators.values import cast, is_floating, number, sizes


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


_MOST_INDICES = 4


@torch_node("Tensor base, Tensor value, bool wrap", differentiable=(0,))
def _fill_diagonal(base: Tensor, value: Tensor, wrap: bool) -> Tensor:
    return base.clone().fill_diagonal_(float(value), wrap)


@torch_node(
    "Tensor base, Tensor values, Tensor one, Tensor two, Tensor three, Tensor four, bool accumulate",
    differentiable=(0, 1),
)
def _index_put(base: Tensor, values: Tensor, *given: Any) -> Tensor:
    *indices, accumulate = given
    return _put(base, values, indices, accumulate=accumulate)


def _put(base: Tensor, values: Tensor, given: list[Tensor], *, accumulate: bool) -> Tensor:
    """Puts values to indices; a floating-point number stands for a dimension without an index."""
    # An ATen node passes booleans as uint8, which torch takes for a mask as well, with a warning.
    indices = [x.bool() if x.element_size() == 1 else None if x.is_floating_point() else x for x in given[: base.dim()]]
    # A mask stands for several dimensions.
    while indices and indices[-1] is None:
        indices.pop()
    if all(x is not None and x.dtype != torch.bool for x in indices):
        # The exporter writes ``x[:, 3] = y`` so, with a dimension of size 1 that y does not have.
        places = torch.broadcast_shapes(*(x.shape for x in indices if x is not None))
        shape = (*places, *base.shape[len(indices) :])
        values = values.reshape(shape) if values.numel() == math.prod(shape) else values
    # Not the method, which takes no None.
    result: Tensor = torch.ops.aten.index_put(base, indices, values, accumulate)
    return result


def _fill_diagonal_symbolic(g: Any, base: Any, value: Any, wrap: Any = False) -> Any:
    return _fill_diagonal(g, base, cast(g, value, base), wrap)


def _index_put_symbolic(g: Any, base: Any, indices: Any, values: Any, accumulate: Any = False) -> Any:
    from torch.onnx import errors, symbolic_helper

    given = symbolic_helper._unpack_list(indices) if symbolic_helper._is_packed_list(indices) else [indices]
    accumulates = bool(symbolic_helper._parse_arg(accumulate, "b"))
    if not accumulates:
        ranks = _rank(g, 0, base), _rank(g, 2, values)
        is_broadcast = 1 in (g.original_node.inputsAt(2).type().sizes() or ())
        if len(given) > _MOST_INDICES or None in ranks or _are_whole(given, *ranks, is_broadcast):
            return exporter.symbolic("aten::index_put")(g, base, indices, values, accumulate)
        return _index_put(g, base, values, *_four(g, given), accumulates, dims=[None] * ranks[0])
    if len(given) > _MOST_INDICES:
        raise errors.SymbolicValueError(f"index_put with accumulate takes at most {_MOST_INDICES} indices here", base)
    return _index_put(g, base, values, *_four(g, given), accumulates)


def _rank(g: Any, index: int, value: Any) -> Any:
    """Returns the dimensions of an argument, which its value in ONNX's graph need not know."""
    from torch.onnx import symbolic_helper

    known = symbolic_helper._get_tensor_rank(value)
    return g.original_node.inputsAt(index).type().dim() if known is None else known


def _four(g: Any, given: list[Any]) -> list[Any]:
    """Returns the indices, with a floating-point number where there is none; see `_put`."""
    from torch.onnx import symbolic_helper

    padded = [*given, *[None] * (_MOST_INDICES - len(given))]
    nothing = g.op("Constant", value_t=torch.tensor(0.0))
    return [nothing if one is None or symbolic_helper._is_none(one) else one for one in padded]


def _are_whole(indices: list[Any], base_rank: int, value_rank: int, is_broadcast: bool) -> bool:
    """Whether the exporter's ScatterND writes what is assigned: it broadcasts one number, or nothing."""
    from torch.onnx import symbolic_helper

    given = [index for index in indices if not symbolic_helper._is_none(index)]
    if not given:
        # The exporter writes a `copy_` so.
        return True
    if any(index.type().scalarType() == "Bool" for index in given) or len(given) < len(indices):
        return False
    places = max((symbolic_helper._get_tensor_rank(index) or 0) for index in given)
    return value_rank == 0 or (value_rank == places + base_rank - len(given) and not is_broadcast)


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


_SIGMOID = "sigmoid"
_SILU = "silu"


def register_gradients() -> None:
    """Registers the gradients of these nodes with ORTModule; call it before ORTModule's constructor."""
    register_node_gradients({_SIGMOID: gradient(_SIGMOID, "GO(0) O(0)", 1), _SILU: gradient(_SILU, "GO(0) I(0)", 1)})
    for name in (_SIGMOID, _SILU):
        shapes.add(name, lambda x: [shapes.shape_alone(x)])


def called(operator: str, g: Any, x: Any) -> Any:
    """Exports a function of one tensor as a node that calls an operator; integers become floating-point numbers."""
    output = g.original_node.output()
    if not is_floating(x):
        x = cast(g, x, output)
        x.setType(output.type())
    result = g.op(ATEN_OP, x, operator_s=operator)
    result.setType(x.type())
    return result


SYMBOLICS = {
    "aten::instance_norm": _instance_norm,
    **{f"aten::adaptive_avg_pool{n}d": _adaptive_avg_pool for n in (1, 2, 3)},
    "aten::embedding": _embedding,
    "aten::embedding_bag": _embedding_bag,
    "aten::fill_diagonal": _fill_diagonal_symbolic,
    "aten::index_put": _index_put_symbolic,
    "aten::cross_entropy_loss": cross_entropy,
    **{f"aten::{name}": partial(called, name) for name in (_SIGMOID, _SILU)},
}
