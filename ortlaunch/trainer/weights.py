"""A model's weights as safetensors under their plain names: reading initial weights and writing a run's weights."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.base.reading import in_words, load_json
from ortlaunch.models.lora import save_lora
from ortlaunch.run.checkpoints import set_aside
from ortlaunch.trainer.checkpoint.host import storage_key
from ortlaunch.trainer.checkpoint.resume import differences, shapes_of

FILE = "model.safetensors"


def load_weights(model: torch.nn.Module, path: Path, key: str = "model.weights") -> None:
    """Loads stored weights into a plain model.

    Args:
        model: the model, on the CPU and not wrapped.
        path: a safetensors file, or a folder with one or several of them.
        key: the key or option that named the path, for messages.

    Raises:
        RequestError: there is no such file, it cannot be read, or its names or shapes are not the model's.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    stored: dict[str, torch.Tensor] = {}
    for file in _files(path, key):
        try:
            stored |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise RequestError(f"{key}={path}: {file} cannot be read as safetensors: {error}") from error
    stored = fill_names(stored, model)
    shapes = {name: list(value.shape) for name, value in stored.items()}
    if lines := differences(shapes, shapes_of(model)):
        raise RequestError(f"{key}={path} does not fit the model:\n" + "\n".join(lines))
    model.load_state_dict(stored, strict=False)


def fill_names(weights: dict[str, torch.Tensor], model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """`weights` under all their names in `model`: a shared weight may be stored under only one of its names."""
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    by_key = {storage_key(value): weights[name] for name, value in state.items() if name in weights}
    further = {
        name: by_key[key]
        for name, value in state.items()
        if name not in weights and (key := storage_key(value)) in by_key
    }
    return weights | further


def save_weights(
    weights: dict[str, torch.Tensor], model: torch.nn.Module, folder: Path, *, adapter_only: bool = False
) -> None:
    """Writes weights; those of a model of transformers, or of an adapter, such that `from_pretrained` loads them.

    Args:
        weights: every weight and buffer by its plain name, in host memory.
        model: the plain model that they belong to; its own weights are not read.
        folder: where to write; an existing folder is replaced when the new one is complete. One that holds other
            files, which a user has put there, is renamed.
        adapter_only: write what `ortlaunch.models.lora` has added to the model, as peft's.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if adapter_only:
        save_lora(weights, model, partial)
    elif _is_of_transformers(model):
        _save_pretrained(model, weights, partial)
    else:
        from safetensors.torch import save_file

        save_file(_stored_once(weights), partial / FILE, metadata={"format": "pt"})
    _share(partial)
    before = set_aside(folder)
    partial.rename(folder)
    if before is not None and before.is_dir() and _names(before) <= _names(folder):
        shutil.rmtree(before)


def _names(folder: Path) -> set[Path]:
    """The files below a folder, by their paths in it."""
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}


def _share(folder: Path) -> None:
    """Gives the files the mode of the user's other files: safetensors makes them readable by the owner alone."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.iterdir():
        path.chmod(0o666 & ~umask)


def _is_of_transformers(model: torch.nn.Module) -> bool:
    # A `save_pretrained` of another package writes other files, such as peft's of the adapter alone.
    names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(model).__mro__}
    return "transformers.modeling_utils.PreTrainedModel" in names


def _save_pretrained(model: Any, weights: dict[str, torch.Tensor], folder: Path) -> None:
    # One file of any size, so that its name is known.
    model.save_pretrained(folder, state_dict=dict(weights), max_shard_size="100TB")
    # transformers notes the model's precision, and would load the weights in that precision.
    path = folder / "config.json"
    config = json.loads(path.read_text())
    kinds = [str(value.dtype).removeprefix("torch.") for value in weights.values() if value.is_floating_point()]
    if "dtype" in config and kinds:
        config["dtype"] = kinds[0]
        path.write_text(json.dumps(config, indent=2) + "\n")


def _stored_once(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`weights` with each tensor under its first name only: safetensors refuses one tensor under two names."""
    seen = set()
    once = {}
    for name, value in weights.items():
        key = storage_key(value)
        if key is None or key not in seen:
            once[name] = value.contiguous()
            seen.add(key)
    return once


def _files(path: Path, key: str) -> list[Path]:
    path = path.expanduser()
    if path.is_file():
        return [path]
    index = path / f"{FILE}.index.json"
    if index.is_file():
        return [path / name for name in _listed(index, f"{key}={path}")]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise RequestError(f"{key}={path}: there is no .safetensors file in it")
    return files


def _listed(index: Path, shown: str) -> list[str]:
    """The names of the files that the index of weights in several files lists."""
    try:
        return sorted(set(map(str, load_json(index)["weight_map"].values())))
    except (OSError, ValueError) as error:
        raise RequestError(f"{shown}: {index.name} cannot be read: {in_words(error)}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"{shown}: {index.name} has no weight_map with the names of the files") from error
