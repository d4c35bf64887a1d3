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

from ortlaunch.ort.operators import exporter, shapes
from ortlaunch.ort.operators.torch_nodes import torch_node
from ortlaunch.ort.operators.values import integers, is_floating, sizes

_OPERATORS = (
    *("add", "sub", "rsub", "mul", "div", "maximum", "minimum", "where", "lerp", "addcmul", "addcdiv", "clamp"),
    *("clamp_min", "clamp_max", "expand_as"),
)


def _joined(x: list[Any], like: list[Any]) -> list[Any]:
    missing = len(x) - len(like)
    own = [1] * -missing + x[max(missing, 0) :]
    return [*x[: max(missing, 0)], *(mine if size == 1 else size for mine, size in zip(own, like, strict=True))]


@torch_node("Tensor x, Tensor like", differentiable=(0,), shape=_joined)
def _broadcast(x: Tensor, like: Tensor) -> Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, like.shape))


@torch_node("Tensor x, int[] size", differentiable=(0,), shape=lambda x, size: _expanded_shape(x, size))
def _expanded(x: Tensor, size: list[int]) -> Tensor:
    return x.expand(size)


def _expanded_shape(x: list[Any], size: Any) -> list[Any]:
    if not isinstance(size, shapes.Values):
        return [None] * int(size[0])
    kept = [None] * (len(size) - len(x)) + x
    return [own if wanted == -1 else wanted for own, wanted in zip(kept, size, strict=True)]


def register() -> None:
    """Registers the symbolics; call it after those of the same operators."""
    for names, kind in ((_OPERATORS, _Broadcasting), (("expand",), _Expanding)):
        for name in names:
            exporter.replace(f"aten::{name}", kind, kind)


def whole(g: Any, *operands: Any) -> list[Any]:
    """Returns the operands of the operator that is exported, with their size in the result where it is hidden."""
    traced = [_traced_sizes(value) for value in g.original_node.inputs()][: len(operands)]
    result = list(operands)
    for place, own in enumerate(traced):
        for like, other in enumerate(traced):
            if own is not None and other is not None and _is_hidden(g, result[place], place, own, other):
                dims = _joined(sizes(result[place]), sizes(operands[like]))
                result[place] = _broadcast(g, result[place], operands[like], dims=dims)
    return result


@dataclass(frozen=True)
class _Broadcasting:
    """Exports an operator of several tensors."""

    original: Callable[..., Any]

    def __call__(self, g: Any, *arguments: Any, **outputs: Any) -> Any:
        return self.original(g, *whole(g, *arguments), **outputs)


@dataclass(frozen=True)
class _Expanding:
    """Exports ``expand``."""

    original: Callable[..., Any]

    def __call__(self, g: Any, x: Any, size: Any, implicit: Any = None) -> Any:
        own, result = (_traced_sizes(value) for value in (g.original_node.inputsAt(0), g.original_node.output()))
        if own is None or result is None or not _is_hidden(g, x, 0, own, result):
            return self.original(g, x, size, implicit)
        return _expanded(g, x, integers(g, size), dims=[None] * len(result))


def _traced_sizes(value: Any) -> list[int] | None:
    """Returns the sizes that a tensor had in the trace; None for what is no tensor."""
    kind = value.type()
    known = kind.sizes() if kind.kind() == "TensorType" else None
    return None if known is None else list(known)


def _is_hidden(g: Any, x: Any, place: int, own: list[int], other: list[int]) -> bool:
    """Whether the trace has broadcast an operand with a gradient, where the graph does not know that its size is 1."""
    if not is_floating(x) or not g.original_node.inputsAt(place).requires_grad():
        return False
    known = sizes(x)
    shared = min(len(own), len(other), len(known))
    last = zip(own[-shared:], other[-shared:], known[-shared:], strict=True) if shared else ()
    return any(size == 1 and meets != 1 and size_known != 1 for size, meets, size_known in last)
