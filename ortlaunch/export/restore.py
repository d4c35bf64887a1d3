"""From artifacts, as they were exported or trained on a device, back to a PyTorch state dict."""

from __future__ import annotations

from pathlib import Path

import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.config.load import load_config
from ortlaunch.config.schema import Config
from ortlaunch.export.record import CONFIG, REST, Record, load_record
from ortlaunch.ort.artifacts import CHECKPOINT, Checkpoint


def open_artifacts(folder: Path) -> tuple[Record, Config]:
    """What `export artifacts` has left.

    Raises:
        RequestError: it is not there, or is not complete.
    """
    record = load_record(folder, "artifacts")
    missing = [name for name in record.files if not (folder / name).exists()]
    if missing:
        raise RequestError(f"{folder} is not complete: {missing[0]} is missing")
    return record, load_config(folder / CONFIG)


def state_dict(folder: Path, record: Record, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """A checkpoint's parameters by the model's own names, with what the graph has not as it was exported.

    Raises:
        RequestError: the checkpoint is of other artifacts.
    """
    values = {name: torch.from_numpy(array.copy()) for name, array in checkpoint.values().items()}
    expected = {*record.trainable, *record.frozen}
    if wrong := sorted(expected ^ set(values)):
        raise RequestError(f"the checkpoint is not one of {folder}: {wrong[0]} is only in one of them")
    if (folder / REST).is_file():
        from safetensors.torch import load_file

        values = load_file(folder / REST) | values
    return values | {alias: values[name] for alias, name in record.aliases.items() if name in values}


def load_into(model: torch.nn.Module, values: dict[str, torch.Tensor], folder: Path) -> None:
    """Puts a state dict into the model.

    Raises:
        RequestError: the model is another one than was exported.
    """
    try:
        found = model.load_state_dict(values, strict=False)
    except RuntimeError as error:
        raise RequestError(f"{folder / CONFIG} builds another model than was exported: {error}") from error
    if found.missing_keys:
        raise RequestError(f"{folder / CONFIG} builds another model than was exported: {found.missing_keys[0]} is new")


def checkpoint_path(folder: Path, record: Record, given: Path | None) -> Path:
    """The checkpoint that was named, or the one that was exported."""
    path = given or folder / f"{record.prefix}{CHECKPOINT}"
    if not path.exists():
        raise RequestError(f"{path}: no such checkpoint")
    return path
