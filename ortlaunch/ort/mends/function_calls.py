"""Custom ``autograd.Function`` classes as operators of torch, which a graph calls with their own backward.

A Function whose backward is not the derivative of its forward's operators (gradient reversal, a straight-through
estimator, a surrogate gradient) is traced as one operator, and exported as other operators of torch that ONNX lacks:
see `torch_calls`. PyTorch then runs the Function, forward and backward. An operator lives as long as the process, so
graphs with one are not kept for another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from ortlaunch.ort.mends import torch_calls

_LIBRARY = torch.library.Library("ortlaunch", "FRAGMENT")
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_OPERATORS: dict[tuple[type[Function], str], Any] = {}
"""By the class and what stands for its arguments."""
_NUMBERS = itertools.count()


def why_not(cls: type[Function], inputs: tuple[Any, ...]) -> str | None:
    """Says why a Function cannot be such an operator; None if it can be. It is run on copies of the inputs."""
    if not all(_is_plain(one) or isinstance(one, Tensor) for one in inputs):
        return "takes something else than tensors and plain values"
    copies = [_copy(one) if isinstance(one, Tensor) else one for one in inputs]
    tensors = [one for one in copies if isinstance(one, Tensor)]
    before, versions = torch.get_rng_state(), [one._version for one in tensors]
    # The saved tensors are needed here, whatever hooks are set outside.
    with torch.autograd.graph.saved_tensors_hooks(_itself, _itself), torch.enable_grad():
        results = cls.apply(*copies)
        outputs = results if isinstance(results, tuple) else (results,)
        if not all(isinstance(one, Tensor) for one in outputs):
            return "returns something else than tensors"
        differentiable = [one for one in outputs if one.requires_grad]
        if not differentiable:
            return "returns nothing with a gradient"
        wanted = [one for one in tensors if one.requires_grad]
        together = _gradients(differentiable, wanted)
        if len(differentiable) > 1 and not _is_sum(together, differentiable, wanted):
            return "gives gradients for several outputs that are not the sum of those for each"
    if [one._version for one in tensors] != versions:
        return "changes its arguments"
    return None if torch.equal(torch.get_rng_state(), before) else "draws random numbers"


def direction(like: Tensor) -> Tensor:
    """Returns a gradient for an output; for the same output always the same."""
    generator = torch.Generator().manual_seed(like.numel())
    # Unseen by the modes of the export, which refuse a model's own generators.
    with torch._C.DisableTorchFunction():
        return torch.randn(like.shape, generator=generator, dtype=torch.float32).to(like)


def _gradients(outputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> Sequence[Tensor]:
    given = [direction(one) for one in outputs]
    return torch.autograd.grad(outputs, wanted, given, retain_graph=True, allow_unused=True, materialize_grads=True)


def _is_sum(together: Sequence[Tensor], outputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Whether gradients for several outputs are the sum of those for each, which a graph calls one by one."""
    try:
        apart = [_gradients([one], wanted) for one in outputs]
    except Exception:
        # A backward may count on a gradient for each output.
        return False
    return all(
        torch.allclose(torch.stack(parts).sum(0), whole, rtol=1e-4, atol=1e-6 * float(whole.abs().max()))
        for whole, *parts in zip(together, *apart, strict=True)
    )


def _copy(tensor: Tensor) -> Tensor:
    """Returns a tensor that needs a gradient as this one does, and that a Function may change in place."""
    with torch.enable_grad():
        return tensor.detach().requires_grad_(tensor.requires_grad).clone()


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def traced(cls: type[Function], inputs: tuple[Any, ...]) -> Any:
    """Calls a Function as an operator for each of its outputs; returns what its forward returns."""
    tensors = [one for one in inputs if isinstance(one, Tensor)]
    key = cls, repr([_Tensor() if isinstance(one, Tensor) else one for one in inputs])
    if key not in _OPERATORS:
        _OPERATORS[key] = _defined(cls, inputs)
    operators = _OPERATORS[key]
    return tuple(one(*tensors) for one in operators) if isinstance(operators, tuple) else operators(*tensors)


class _Tensor:
    """Stands for an argument that is a tensor."""

    def __repr__(self) -> str:
        return "a tensor"


def _defined(cls: type[Function], inputs: Sequence[Any]) -> Any:
    """Returns the operator of a Function with these constants, or those of its several outputs."""
    places = [place for place, one in enumerate(inputs) if isinstance(one, Tensor)]
    constants = [None if isinstance(one, Tensor) else one for one in inputs]

    def called(*tensors: Tensor) -> Any:
        filled = list(constants)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        return cls.apply(*filled)

    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        results = called(*(inputs[place].detach() for place in places))
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]
    if not isinstance(results, tuple):
        return _operator(called, len(places))
    # The exporter takes no operator with several results within a Function.
    return tuple(_operator(partial(_output, called, index), len(places)) for index in range(len(results)))


def _output(called: Callable[..., Any], index: int, *tensors: Tensor) -> Any:
    return called(*tensors)[index]


def _operator(called: Callable[..., Any], count: int) -> Any:
    from torch.onnx import register_custom_op_symbolic  # type: ignore[attr-defined]

    name = f"function_{next(_NUMBERS)}"
    _LIBRARY.define(f"{name}({', '.join(f'Tensor x{index}' for index in range(count))}) -> Tensor")
    # Autograd sees the Function and not the operator.
    _LIBRARY.impl(name, called, "CompositeImplicitAutograd")
    register_custom_op_symbolic(f"ortlaunch::{name}", torch_calls.exported, torch_calls.OPSET)
    return getattr(torch.ops.ortlaunch, name)


def _is_plain(one: Any) -> bool:
    return all(map(_is_plain, one)) if isinstance(one, tuple | list) else isinstance(one, _PLAIN)
