"""Refuses models whose forward has effects beside its outputs that a graph does not repeat.

ORTModule calls the forward only to trace it. A hook of a tensor's gradient and a change of a parameter, as
``Embedding(max_norm=...)`` makes it, would happen then and never again, and the run would train differently from eager
without an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ortlaunch.ort.mends.functions import caller
from ortlaunch.ort.refusal import refusal

_EMBEDDINGS = (functional.embedding, functional.embedding_bag)
_ADVICE = "which would happen once under ONNX Runtime, while the model is traced, and never again"


class RefusesSideEffects(TorchFunctionMode):
    """Raises at a call that changes a parameter of the model or registers a hook of a tensor.

    Raises:
        RequestError: names the parameter and the line of the call.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._names = {address_of(parameter): name for name, parameter in model.named_parameters()}
        self._names.pop(0, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.register_hook:
            raise refusal(
                f"forward registers a hook of a tensor's gradient ({caller()}), {_ADVICE}: write it as operators or as "
                "an autograd.Function, or use backend=eager or compile"
            )
        if func in _EMBEDDINGS and (kwargs or {}).get("max_norm") is not None:
            raise refusal(
                f"an Embedding with max_norm changes its weight in forward ({caller()}), {_ADVICE}: normalize the rows "
                "in forward without max_norm, or use backend=eager or compile"
            )
        watched = [(x, x._version, address) for x, address in self._parameters((*args, *(kwargs or {}).values()))]
        result = func(*args, **(kwargs or {}))
        for tensor, version, address in watched:
            if tensor._version != version or address_of(tensor) != address:
                raise refusal(
                    f"forward changes the parameter {self._names[address]} ({caller()}), {_ADVICE}: change it in a "
                    "step of its own or compute with a changed copy, or use backend=eager or compile"
                )
        return result

    def _parameters(self, values: Any) -> Iterator[tuple[Tensor, int]]:
        """Yields tensors with the memory of a parameter, and its address."""
        for value in values:
            if isinstance(value, tuple | list):
                yield from self._parameters(value)
            elif isinstance(value, Tensor) and not value.is_inference():
                address = address_of(value)
                if address in self._names:
                    yield value, address


def address_of(tensor: Tensor) -> int:
    """Returns the address of a tensor's memory; 0 without one."""
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return 0
    with torch._C.DisableTorchFunction():
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            # One inside torch.vmap.
            return 0
        return storage.data_ptr()
