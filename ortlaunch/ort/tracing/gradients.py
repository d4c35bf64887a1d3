"""Stops gradients at ``Tensor.detach`` and in ``torch.no_grad`` inside a model under ORTModule.

torch's exporter drops both, which is right only for inference. ONNX Runtime would train weights that eager does not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ortlaunch.ort.refusal import refusal
from ortlaunch.ort.source import asking_place, location, statement_at
from ortlaunch.ort.tracing import functions

_IN_PLACE = ("__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")))
"""Methods that change a tensor and whose names do not end as those of the others."""


@contextlib.contextmanager
def tracked() -> Iterator[None]:
    """Traces a model with gradients as in training, and detaches results where the model switches gradients off."""
    # Nothing is differentiated here, so no tensors need be saved.
    forgetting = torch.autograd.graph.saved_tensors_hooks(_nothing, refuse_gradients)
    with torch.enable_grad(), forgetting, _DetachesWhereGradientsAreOff():
        yield


def _nothing(_tensor: Any) -> Any:
    return None


def refuse_gradients(*_nothing_saved: Any) -> Any:
    """Raises at a call that differentiates in forward; the message names its line."""
    place = asking_place()
    raise refusal(
        f"`{statement_at(*place)}` at {location(place)} computes gradients in forward, and ONNX Runtime's graph has no "
        "gradients of gradients: use backend=eager or backend=compile"
    )


class _DetachesWhereGradientsAreOff(TorchFunctionMode):
    """Follows the model's own switching of gradients.

    ``torch.is_grad_enabled`` does not show it. While ``autograd.Function.apply`` runs a forward, and wraps a returned
    input (``view_as``), gradients are off although the Function is differentiated.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = torch.is_grad_enabled()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._enabled and func in functions.DETACH and functions.passes_detach():
            return args[0]
        has_gradients = self._enabled and not torch.is_inference_mode_enabled()
        if not has_gradients and _is_in_place(func):
            # What is changed, such as a buffer, gets values and no gradients.
            args, kwargs = (*args[:1], *_detached(args[1:], ())), _detached(kwargs or {}, ())
        result = func(*args, **(kwargs or {}))
        if func is torch._C._set_grad_enabled:  # type: ignore[comparison-overlap]
            # In a Function's forward the switch has no effect on how the Function is differentiated.
            self._enabled = self._enabled if functions.is_running() else bool(args[0])
            return result
        if has_gradients or func is Tensor.detach:
            return result
        if not any(x.requires_grad for x in tensors((args, kwargs))):
            return result
        return _detached(result, args)


def _detached(result: Any, args: Any) -> Any:
    if isinstance(result, Tensor):
        # A tensor that was changed in place must stay the same object.
        is_input = any(result is x for x in args)
        return result if is_input or not result.is_floating_point() else result.detach()
    if type(result) in (tuple, list):
        return type(result)(_detached(x, args) for x in result)
    if type(result) is dict:
        return {name: _detached(x, args) for name, x in result.items()}
    return result


def _is_in_place(func: Any) -> bool:
    """Whether a function of torch changes its first argument."""
    name = getattr(func, "__name__", "")
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def tensors(values: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested values."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from tensors(value)
    elif isinstance(values, dict):
        yield from tensors(list(values.values()))
