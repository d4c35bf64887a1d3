"""Checks that a graph has each parameter of the model under its own name, and that none is folded into a constant."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from onnx import ModelProto

from ortlaunch.base.errors import RequestError
from ortlaunch.export import external_data, graph
from ortlaunch.export.forward import Forward, untouched
from ortlaunch.models.task import Batch
from ortlaunch.trainer.checkpoint.host import storage_key


@dataclass(frozen=True)
class Names:
    """The names of a model's tensors, and which of them are in the graph."""

    parameters: tuple[str, ...]
    """Parameters in the graph."""
    buffers: tuple[str, ...]
    """Buffers in the graph."""
    unused: tuple[str, ...]
    """Parameters that the forward does not use; the graph does not have them."""
    aliases: dict[str, str]
    """For each further name of a tied weight, the name that it has in the graph."""


def aliases_of(model: torch.nn.Module) -> dict[str, str]:
    """Returns the further names of tensors that have several, each with the first name of its tensor."""
    first: dict[object, str] = {}
    found = {}
    for name, tensor in _tensors(model).items():
        key = storage_key(tensor)
        if key is None:
            continue
        if first.setdefault(key, name) != name:
            found[name] = first[key]
    return found


def settle(
    model: torch.nn.Module, forward: Forward, batch: Batch, exported: ModelProto, folder: Path | None = None
) -> Names:
    """Renames tied weights to their first name in the graph, in place, and checks that no weight is missing or changed.

    Args:
        model: the exported model.
        forward: how the model is called.
        batch: the batch to call it with.
        exported: the graph.
        folder: the folder of the external data, if any.

    Raises:
        RequestError: a parameter that the forward uses is missing under its name, or has other values.
    """
    aliases = aliases_of(model)
    there = graph.initializers(exported)
    # The exporter may store a tied weight under any of its names, or several times; the copies would train separately.
    graph.rename(exported, {name: first for name, first in aliases.items() if name in there})
    there = graph.initializers(exported)
    parameters = {name: tensor for name, tensor in model.named_parameters() if name not in aliases}
    missing = [name for name in parameters if name not in there]
    used = _used(model, forward, batch, missing)
    if used:
        raise RequestError(
            f"the export has folded {', '.join(used[:3])}{' and others' if len(used) > 3 else ''}: the forward uses "
            "it, and the graph has no initializer of that name. Does forward compute with a copy of it?"
        )
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in there and name not in aliases}
    # Tracing runs the model, which changes BatchNorm's statistics before they are written.
    moved = _changed(buffers, exported, folder)
    graph.set_values(exported, {name: buffers[name].detach().numpy() for name in moved})
    changed = _changed(_tensors(model), exported, folder)
    if changed:
        raise RequestError(f"the export has changed the values of {', '.join(changed[:3])}")
    return Names(tuple(name for name in parameters if name in there), tuple(buffers), tuple(missing), aliases)


def _changed(tensors: dict[str, torch.Tensor], exported: ModelProto, folder: Path | None) -> list[str]:
    """Returns the names of tensors that have other values in the graph."""
    there = graph.initializers(exported)
    return [
        name
        for name, tensor in tensors.items()
        if name in there and not np.array_equal(external_data.value(there[name], folder), tensor.detach().numpy())
    ]


def _used(model: torch.nn.Module, forward: Forward, batch: Batch, names: list[str]) -> list[str]:
    """Returns those of the named parameters that the outputs depend on."""
    if not names:
        return []
    parameters = dict(model.named_parameters())
    wanted = [parameters[name] for name in names]
    before = [parameter.requires_grad for parameter in wanted]
    for parameter in wanted:
        parameter.requires_grad_(True)
    with untouched(model), torch.enable_grad():
        outputs = forward.task.outputs(model, batch)
        tensors = _differentiable(outputs)
        gradients = torch.autograd.grad([one.sum() for one in tensors], wanted, allow_unused=True) if tensors else ()
    for parameter, flag in zip(wanted, before, strict=True):
        parameter.requires_grad_(flag)
    return [name for name, gradient in zip(names, gradients, strict=False) if gradient is not None]


def _differentiable(outputs: object) -> list[torch.Tensor]:
    values = (
        outputs.values() if isinstance(outputs, dict) else outputs if isinstance(outputs, list | tuple) else [outputs]
    )
    return [one for one in values if isinstance(one, torch.Tensor) and one.requires_grad]


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return found | dict(model.named_buffers(remove_duplicate=False))
