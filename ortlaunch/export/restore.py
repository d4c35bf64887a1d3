"""Converts artifacts, as exported or trained on a device, to a PyTorch state dict."""

from __future__ import annotations

from pathlib import Path

import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.base.ownership import require_own
from ortlaunch.base.reading import is_inside
from ortlaunch.config.load import load_config
from ortlaunch.config.schema import Config
from ortlaunch.export.record import CONFIG, RECORD, REST, ExportRecord, load_record
from ortlaunch.ort.artifacts import CHECKPOINT, Checkpoint


def open_artifacts(folder: Path) -> tuple[ExportRecord, Config]:
    """Returns the record and the configuration of an `export artifacts` folder.

    Raises:
        RequestError: the record or a file is missing.
    """
    # The configuration names the model's code, which is imported to build it.
    require_own(folder, folder / RECORD, folder / CONFIG, use="export")
    record = load_record(folder, "artifacts")
    missing = [name for name in record.files if not is_inside(name) or not (folder / name).is_file()]
    if missing:
        raise RequestError(f"{folder} is not complete: {missing[0]} is missing")
    return record, load_config(folder / CONFIG)


def state_dict(folder: Path, record: ExportRecord, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Returns a checkpoint's parameters by the model's own names; tensors outside the graph come from the export.

    Raises:
        RequestError: the checkpoint belongs to other artifacts.
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
    """Loads a state dict into the model.

    Raises:
        RequestError: the configuration builds another model than the one that was exported.
    """
    try:
        found = model.load_state_dict(values, strict=False)
    except RuntimeError as error:
        raise RequestError(f"{folder / CONFIG} builds another model than was exported: {error}") from error
    if found.missing_keys:
        raise RequestError(f"{folder / CONFIG} builds another model than was exported: {found.missing_keys[0]} is new")


def checkpoint_path(folder: Path, record: ExportRecord, given: Path | None) -> Path:
    """Returns the checkpoint that the user named, or the exported one."""
    path = given or folder / f"{record.prefix}{CHECKPOINT}"
    if not path.exists():
        raise RequestError(f"{path}: no such checkpoint")
    return path
