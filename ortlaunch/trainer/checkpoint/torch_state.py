"""The training state of an engine whose optimizer is torch's: the model whole on every worker, or sharded (DTensor).

Tensors are written by torch.distributed.checkpoint, the workers sharing the work; the little that is no tensor goes
into a file of its own. Everything has the plain model's names and global shapes, so the number of workers may change,
and what was whole may go on sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from ortlaunch.trainer.checkpoint.host import save_file, storage_key, to_host

_TENSORS, _REST = "tensors", "rest.pt"
_MODEL, _OPTIMIZER = "model/", "optimizer/"

Write = Callable[[dist.ProcessGroup], None]
"""Writes this worker's part of a snapshot; all workers call it, from any thread, with a group that is theirs alone."""


def snapshot(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, rest: dict[str, Any], folder: Path, *, is_first: bool
) -> Write:
    """Copies model and optimizer to host memory.

    Args:
        model: the module whose state dict has plain names.
        optimizer: over parameters of `model`.
        rest: further state without tensors, by name.
        folder: where it will be written.
        is_first: whether this is the first worker. Buffers are its own alone: DistributedDataParallel sends its
            buffers to the others before every forward, so between steps theirs may differ.
    """
    # Before the parameters are listed: a sharded model puts its shards in place for it.
    state = model.state_dict(keep_vars=True)
    parameters = dict(model.named_parameters())
    tensors = {_MODEL + name: value for name, value in _once(state).items() if is_first or name in parameters}
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in parameters.items()}
    plain: dict[str, dict[str, Any]] = {}
    for parameter, fields in optimizer.state.items():
        for field, value in fields.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{_OPTIMIZER}{names[parameter]}/{field}"] = value
            else:
                plain.setdefault(names[parameter], {})[field] = value
    groups = [
        {**group, "params": [names[parameter] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    copied, others = to_host(tensors), to_host({**rest, "groups": groups, "plain": plain})

    def write(group: dist.ProcessGroup) -> None:
        # First what all workers do together: one of them that fails before it would leave the others waiting.
        save(copied, storage_writer=FileSystemWriter(folder / _TENSORS, sync_files=False), process_group=group)
        if is_first:
            save_file(others, folder / _REST)

    return write


def restore(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path, group: dist.ProcessGroup
) -> dict[str, Any]:
    """Loads what `snapshot` wrote into model and optimizer; all workers call it.

    Returns:
        The further state.
    """
    state = model.state_dict(keep_vars=True)
    tensors = read_tensors(folder, group, {name: value for name, value in state.items() if isinstance(value, DTensor)})
    rest = torch.load(folder / _REST, weights_only=True)
    known = {key.removeprefix(_MODEL): value for key, value in tensors.items() if key.startswith(_MODEL)}
    model.load_state_dict(_filled(known, state))
    fields: dict[str, dict[str, Any]] = rest.pop("plain")
    for key, value in tensors.items():
        if key.startswith(_OPTIMIZER):
            name, _, field = key.removeprefix(_OPTIMIZER).rpartition("/")
            fields.setdefault(name, {})[field] = value
    _load_optimizer(optimizer, rest.pop("groups"), fields, dict(model.named_parameters()))
    return rest


def read_tensors(
    folder: Path, group: dist.ProcessGroup | None, sharded: Mapping[str, DTensor] | None = None
) -> dict[str, torch.Tensor]:
    """All tensors that `snapshot` wrote.

    Args:
        folder: where they are.
        group: the workers that read together; None for a process on its own.
        sharded: the model's sharded parameters by name. What was stored of them is read shard by shard to their
            device; everything else is read whole to host memory.
    """
    reader = FileSystemReader(folder / _TENSORS)
    stored = reader.read_metadata().state_dict_metadata
    tensors = {
        key: _room(key, entry, sharded or {})
        for key, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(tensors, storage_reader=reader, process_group=group)
    return tensors


def _room(key: str, entry: TensorStorageMetadata, sharded: Mapping[str, DTensor]) -> torch.Tensor:
    """An empty tensor to read a stored one into, sharded as its parameter is where it has the parameter's shape."""
    name = key.removeprefix(_MODEL) if key.startswith(_MODEL) else key.removeprefix(_OPTIMIZER).rpartition("/")[0]
    parameter = sharded.get(name)
    if parameter is None or parameter.shape != entry.size:
        return torch.empty(entry.size, dtype=entry.properties.dtype)
    return torch.empty_like(parameter.detach(), dtype=entry.properties.dtype)


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The model's own part of what `snapshot` wrote; a weight that has two names comes by the first."""
    tensors = read_tensors(folder, None)
    return {key.removeprefix(_MODEL): value for key, value in tensors.items() if key.startswith(_MODEL)}


def _load_optimizer(
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    fields: dict[str, dict[str, Any]],
    parameters: dict[str, torch.nn.Parameter],
) -> None:
    """Hands state by name to the optimizer, which knows its parameters by number."""
    names = {parameter: name for name, parameter in parameters.items()}
    ours = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    if ours != [group["params"] for group in groups]:
        raise ValueError("the optimizer groups its parameters in another way than when the checkpoint was written")
    order = [name for group in ours for name in group]
    numbers = {name: number for number, name in enumerate(order)}
    optimizer.load_state_dict(
        {
            "state": {numbers[name]: state for name, state in fields.items()},
            "param_groups": [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups],
        }
    )


def _once(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a state dict, one that has several names by the first of them."""
    seen = set()
    once = {}
    for name, value in state.items():
        key = _identity(value)
        if key is None or key not in seen:
            once[name] = value
            seen.add(key)
    return once


def _filled(known: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`known` with the further names that tensors have in `state`."""
    by_key = {_identity(value): known[name] for name, value in state.items() if name in known}
    return {name: known[name] if name in known else by_key[_identity(value)] for name, value in state.items()}


def _identity(value: torch.Tensor) -> object:
    """Equal for the names of one tensor in a state dict with its variables; None for one without memory."""
    # Memory does not tell: this worker's shard may be empty, and all workers must store under the same names.
    return id(value) if isinstance(value, DTensor) else storage_key(value)
