"""Sums the gradients of operands that are broadcast along a dimension of which a graph does not know that it is one.

ORTModule's inference of shapes takes two sizes that meet in a sum or a product for the same if it knows neither, as
those of ``h`` and ``h[:, :n]``. With n=1 the second operand would get the gradient of the first without a sum. What the
trace has broadcast so gets its size by a node of its own, which PyTorch differentiates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ortlaunch.ort.mends.torch_nodes import torch_node
from ortlaunch.ort.mends.values import is_floating, sizes

_OPSET = 17
_OPERATORS = ("add", "sub", "rsub", "mul", "div", "maximum", "minimum")


def _joined(x: list[Any], like: list[Any]) -> list[Any]:
    missing = len(x) - len(like)
    own = [1] * -missing + x[max(missing, 0) :]
    return [*x[: max(missing, 0)], *(mine if size == 1 else size for mine, size in zip(own, like, strict=True))]


@torch_node("Tensor x, Tensor like", differentiable=(0,), shape=_joined)
def _broadcast(x: Tensor, like: Tensor) -> Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, like.shape))


def register() -> None:
    """Registers the symbolics; call it after those of the same operators."""
    from torch.onnx import register_custom_op_symbolic  # type: ignore[attr-defined]
    from torch.onnx._internal import registration

    for name in _OPERATORS:
        group = registration.registry.get_function_group(f"aten::{name}")
        original = group.get(_OPSET) if group is not None else None
        if original is not None and not isinstance(original, _Broadcasting):
            register_custom_op_symbolic(f"aten::{name}", _Broadcasting(original), _OPSET)


@dataclass(frozen=True)
class _Broadcasting:
    """Exports an operator of two tensors."""

    original: Callable[..., Any]

    def __call__(self, g: Any, one: Any, other: Any, *rest: Any) -> Any:
        whole = _whole(g, one, other, 0), _whole(g, other, one, 1)
        return self.original(g, *whole, *rest)


def _whole(g: Any, x: Any, like: Any, index: int) -> Any:
    """Returns an operand in the size of the result if that size is needed for its gradient."""
    traced = [g.original_node.inputsAt(place).type() for place in (index, 1 - index)]
    if any(kind.kind() != "TensorType" or kind.sizes() is None for kind in traced):
        return x
    own, other = (list(kind.sizes()) for kind in traced)
    known = sizes(x)
    if not is_floating(x) or not traced[0].requires_grad() or len(known) != len(own):
        return x
    first = max(len(own) - len(other), 0)
    of_other = other[max(len(other) - len(own), 0) :]
    is_hidden = any(
        size == 1 and meets != 1 and known[first + place] != 1
        for place, (size, meets) in enumerate(zip(own[first:], of_other, strict=True))
    )
    return _broadcast(g, x, like, dims=_joined(known, sizes(like))) if is_hidden else x
