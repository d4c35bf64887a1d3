"""Truth values in traced graphs: ``any`` and ``all``, and True and False in the place of numbers.

torch's exporter casts what ``any`` is asked about to int64 and adds it up, so that 0.3 counts as zero and -1 and 1
cancel each other; ``all`` takes booleans alone. torch's tracer stops where a number is True or False, as in
``mask == False`` and ``torch.where(mask, True, other)``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ortlaunch.ort.kernels.traced import integers
from ortlaunch.ort.mends.values import cast

_NUMBERS = frozenset(
    (
        *("eq", "ne", "lt", "le", "gt", "ge", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
        *("masked_fill", "masked_fill_", "fill_", "full", "full_like", "new_full"),
    )
)
"""Functions whose result has the same dtype with the number 1 as with True, or for which it is given."""
_KEYWORDS = ("value", "other", "fill_value")
_TENSORS = frozenset(
    (
        *("where", "add", "__add__", "__radd__", "mul", "__mul__", "__rmul__"),
        *(f"{prefix}{name}__" for prefix in ("__", "__r", "__i") for name in ("and", "or", "xor")),
        *(f"bitwise_{name}" for name in ("and", "or", "xor")),
    )
)
"""Functions that take a tensor in the place of True."""


class TakesTruths(TorchFunctionMode):
    """Gives a traced call the number or the tensor that True or False stands for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        name = getattr(func, "__name__", "")
        if torch._C._get_tracing_state() is None:
            return func(*args, **named)
        value = args[1] if len(args) > 1 else named.get("fill_value")
        if name == "full" and isinstance(value, bool) and named.get("dtype") is None:
            named = {**named, "dtype": torch.bool}
        tensor = next((one for one in args if isinstance(one, torch.Tensor)), None)
        if name in _NUMBERS:
            replace: Any = int
        elif name in _TENSORS and tensor is not None:
            # Not a number in a tensor, which the exporter makes True again.
            replace = partial(_like, tensor)
        else:
            return func(*args, **named)
        args = tuple(replace(one) if isinstance(one, bool) else one for one in args)
        for key in _KEYWORDS:
            if isinstance(named.get(key), bool):
                named = {**named, key: replace(named[key])}
        return func(*args, **named)


def _like(tensor: torch.Tensor, truth: bool) -> torch.Tensor:
    return (torch.ones_like if truth else torch.zeros_like)(tensor, dtype=torch.bool)


def _symbolic(of_all: bool, g: Any, values: Any, dims: Any = None, keep: Any = None) -> Any:
    """Exports ``any`` as a count of what is not zero, and ``all`` as no one that is."""
    from torch.onnx import TensorProtoDataType, symbolic_helper

    truths = values
    if values.type().scalarType() != "Bool":
        truths = g.op("Cast", values, to_i=TensorProtoDataType.BOOL)
    counted = g.op("Not", truths) if of_all else truths
    has_dims = dims is not None and not symbolic_helper._is_none(dims)
    # A single dimension is a number, several are a list.
    axes = (integers(dims) or symbolic_helper._parse_arg(dims, "is")) if has_dims else None
    if axes == []:
        result = truths
    else:
        is_number = symbolic_helper._get_tensor_rank(values) == 0
        inputs = [] if axes is None or is_number else [g.op("Constant", value_t=torch.tensor(axes))]
        kept = keep is not None and bool(symbolic_helper._get_const(keep, "b", "keepdim"))
        count = g.op("ReduceSum", g.op("Cast", counted, to_i=TensorProtoDataType.INT64), *inputs, keepdims_i=int(kept))
        found = g.op("Greater", count, g.op("Constant", value_t=torch.tensor(0)))
        result = g.op("Not", found) if of_all else found
    output = g.original_node.output()
    return result if output.type().scalarType() in ("Bool", None) else cast(g, result, output)


SYMBOLICS = {f"aten::{name}": partial(_symbolic, name == "all") for name in ("any", "all")}
