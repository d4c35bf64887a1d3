"""Checks a model before a backend or a trainer wraps it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ortlaunch.base.errors import RequestError
from ortlaunch.models.strides import is_dense, is_own

_WRAPPERS = {
    "ORTModule": ("onnxruntime", "torch_ort"),
    "DeepSpeedEngine": ("deepspeed",),
    "DistributedDataParallel": ("torch",),
    "FullyShardedDataParallel": ("torch",),
    "FSDPModule": ("torch",),
    "OptimizedModule": ("torch",),
}
"""The class name of each wrapper, and the packages it comes from. A name needs no import of the package."""

_KINDS: dict[str, tuple[Callable[[Tensor], bool], str, str]] = {
    "complex": (Tensor.is_complex, "is complex", "hold its parts as real numbers (torch.view_as_real)"),
    "empty": (lambda weight: weight.numel() == 0, "has no elements", "leave it out"),
    "scalar": (lambda weight: weight.dim() == 0, "has no dimensions", "give it one of a single element"),
}
"""Weights that some trainers do not take: how to tell them, what they are, and what to do instead."""


def check_model(model: object) -> None:
    """Checks that a model is plain and trainable, so that a backend and a trainer can wrap it.

    Args:
        model: the object that a builder returned.

    Raises:
        RequestError: the model is no torch.nn.Module, has no trainable registered parameter or one without a size,
            keeps trainable weights where PyTorch does not see them or in memory of other weights, or it or one of its
            modules is already wrapped.
    """
    if not isinstance(model, nn.Module):
        raise RequestError(
            f"the model is a {type(model).__name__}, not a torch.nn.Module: let what model.target names be a "
            "torch.nn.Module class, or a function that returns an instance of one"
        )
    for place, module in _modules(model):
        _refuse_wrapper(module, place)
    _refuse_hidden_weights(model)
    _refuse_lazy_weights(model)
    _refuse_untrainable(model)
    _refuse_shared_memory(model)


def _refuse_wrapper(module: nn.Module, place: str) -> None:
    if isinstance(module, nn.DataParallel):
        raise RequestError(
            f"the model contains torch.nn.DataParallel ({place}), which ORTModule and several workers cannot work "
            "with: return the plain module, ortlaunch puts DistributedDataParallel around it (trainer=ddp)"
        )
    wrapper = _wrapper_name(module)
    if wrapper:
        raise RequestError(
            f"the model is already wrapped in {wrapper} ({place}): return the plain module, ortlaunch wraps it "
            "itself in the order that works (backend=ort|compile|eager inside, trainer=ddp|deepspeed|single outside)"
        )


def _wrapper_name(module: nn.Module) -> str | None:
    for kind in type(module).__mro__:
        if kind.__module__.partition(".")[0] in _WRAPPERS.get(kind.__name__, ()):
            return kind.__name__
    # module.compile() does not change the class.
    return "torch.compile" if getattr(module, "_compiled_call_impl", None) is not None else None


def _refuse_hidden_weights(model: nn.Module) -> None:
    for path in _hidden_weights(model):
        raise RequestError(
            f"the model keeps trainable weights in '{path}', where PyTorch does not see them, so they would never "
            "be trained: hold tensors as torch.nn.Parameter and modules in torch.nn.ModuleList or ModuleDict, "
            "or call requires_grad_(False) on what is not to be trained"
        )


def _refuse_lazy_weights(model: nn.Module) -> None:
    for path, weight in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(weight):
            raise RequestError(
                f"the model's '{path}' has no size before the first forward (torch.nn.Lazy…): give its layer one, or "
                "run one batch through the model in what model.target names"
            )


def _hidden_weights(model: nn.Module) -> Iterator[str]:
    """The paths of attributes that hold trainable leaf tensors outside `model.parameters()`."""
    registered = {id(parameter) for parameter in model.parameters()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            weights = (weight for item in _items(value) for weight in _weights(item))
            if any(w.requires_grad and w.is_leaf and id(w) not in registered for w in weights):
                yield f"{path}.{name}".lstrip(".")


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _weights(item: Any) -> list[Tensor]:
    if isinstance(item, nn.Module):
        return list(item.parameters())
    return [item] if isinstance(item, Tensor) else []


def _refuse_untrainable(model: nn.Module) -> None:
    parameters = list(model.parameters())
    if not parameters:
        raise RequestError(
            f"the model {type(model).__name__} has no parameters: hold its weights as torch.nn.Parameter "
            "or in submodules"
        )
    if not any(parameter.requires_grad for parameter in parameters):
        raise RequestError(
            f"the model {type(model).__name__} has no trainable parameter: all {len(parameters)} have "
            "requires_grad=False"
        )


def _refuse_shared_memory(model: nn.Module) -> None:
    """Refuses weights that are one in memory alone: a sharding trainer, or a move to a GPU, would part them."""
    together: defaultdict[tuple[int, torch.dtype], list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for path, weight in model.named_parameters():
        if weight.layout is torch.strided:
            together[weight.untyped_storage()._cdata, weight.dtype].append((path, weight))
    for weights in together.values():
        if all(not weight.requires_grad for _, weight in weights) or (len(weights) == 1 and is_dense(weights[0][1])):
            continue
        if expanded := [path for path, weight in weights if not is_own(weight)]:
            raise RequestError(
                f"several elements of the model's weight '{expanded[0]}' lie in the same memory, as expand() leaves "
                "them, and cannot be trained: make it a torch.nn.Parameter before it is expanded, and expand it in "
                "forward"
            )
        # Which weight has each element of the memory; in numpy, since torch has no values while a run is estimated.
        owners = np.zeros(weights[0][1].untyped_storage().nbytes() // weights[0][1].element_size(), dtype=np.int32)
        for number, (path, weight) in enumerate(weights, start=1):
            steps = [step * owners.itemsize for step in weight.stride()]
            place = np.lib.stride_tricks.as_strided(owners[weight.storage_offset() :], weight.shape, steps)
            if place.any():
                other = weights[int(place.max()) - 1][0]
                raise RequestError(
                    f"the model's weights '{other}' and '{path}' lie in the same memory, and would be parted by a "
                    "move to a GPU and by trainers that shard weights: give both names the same torch.nn.Parameter, "
                    "or one of them a .clone()"
                )
            place[...] = number


def check_precision(model: nn.Module) -> None:
    """Checks that the weights to train are in fp32, so that small updates are not lost.

    Raises:
        RequestError: one has fewer bits, as transformers loads a model whose files do.
    """
    for path, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_floating_point() and parameter.element_size() < 4:
            raise RequestError(
                f"the model's '{path}' is in {str(parameter.dtype).removeprefix('torch.')}, and weights are trained in "
                "fp32 (train.precision=bf16 computes in bf16): return the model in fp32, from_pretrained takes "
                "dtype=torch.float32, or call requires_grad_(False) on what is not to be trained"
            )


def refuse_kinds(model: nn.Module, trainer: str, *kinds: str) -> None:
    """Refuses kinds of weights that a trainer does not take.

    Args:
        model: the model.
        trainer: the trainer as the user has chosen it.
        kinds: some of the keys of `_KINDS`.

    Raises:
        RequestError: the model has such a weight.
    """
    for path, weight in model.named_parameters():
        for kind in kinds:
            is_of_kind, what, remedy = _KINDS[kind]
            if is_of_kind(weight):
                raise RequestError(
                    f"the model's '{path}' {what}, which {trainer} does not take: {remedy}, or choose trainer=ddp"
                )


def reject_data_parallel(model: nn.Module) -> None:
    """Refuses a torch.nn.DataParallel anywhere in the model, also inside a wrapper.

    Raises:
        RequestError: the model contains one. The message says where, and what to use instead.
    """
    for place, module in _modules(model):
        if isinstance(module, nn.DataParallel):
            _refuse_wrapper(module, place)


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields every module with a text for its place. Unlike named_modules, it also yields an ORTModule itself."""
    waiting, seen = [("", model)], {id(model)}
    while waiting:
        path, module = waiting.pop()
        yield f"at '{path}'" if path else "around the whole of it", module
        for name, child in module.named_children():
            if id(child) not in seen:
                seen.add(id(child))
                waiting.append((f"{path}.{name}".lstrip("."), child))
