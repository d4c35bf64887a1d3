"""`export.json`: describes an export, so that other programs can use it and `export verify` can repeat it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ortlaunch.base.errors import RequestError
from ortlaunch.base.reading import in_words, load_json
from ortlaunch.tracking.artifacts import EXPORT_RECORD

RECORD = EXPORT_RECORD
CONFIG = "config.yaml"
REST = "rest.safetensors"
"""Tensors of the model that are not in the graph: counters, and parameters that the forward does not use."""
_FORMAT = 1


@dataclass(frozen=True)
class Port:
    """An input or output of the graph."""

    name: str
    dtype: str
    """The name of the type in numpy."""
    shape: tuple[int | str, ...]
    """Sizes; a name stands for a variable size."""


@dataclass
class ExportRecord:
    """The content of `export.json`."""

    kind: str
    """onnx, artifacts or inference."""
    model: str
    """The name of the graph's file."""
    inputs: list[Port]
    outputs: list[Port]
    loss: str | None
    """own, cross_entropy, mse or bce; None if the files contain no loss."""
    ortlaunch: str
    ir_version: int
    opset: int
    weights: str
    """Where the weights come from, in words."""
    run_dir: str | None = None
    files: dict[str, int] = field(default_factory=dict)
    """Size of each file in bytes."""
    aliases: dict[str, str] = field(default_factory=dict)
    """For each further name of a tied weight, the name that it has in the graph."""
    statistics: dict[str, str] = field(default_factory=dict)
    """For each output of the training model with a new BatchNorm statistic, the parameter that receives it."""
    prefix: str = ""
    trainable: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    optimizer: dict[str, Any] = field(default_factory=dict)
    findings: dict[str, Any] = field(default_factory=dict)
    """Results of the checks, with figures."""
    format: int = _FORMAT

    def save(self, folder: Path) -> None:
        """Writes the record with the sizes of the files in the folder."""
        self.files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != RECORD}
        (folder / RECORD).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")


def load_record(folder: Path, kind: str) -> ExportRecord:
    """Reads the record of an export of this kind.

    Raises:
        RequestError: there is no record, or it has another kind or version.
    """
    path = folder / RECORD
    try:
        values = load_json(path)
        record = ExportRecord(**values)
    except FileNotFoundError:
        raise RequestError(f"{folder} holds no export: it has no {RECORD}") from None
    except (OSError, ValueError, TypeError) as error:
        raise RequestError(f"{path} cannot be read: {in_words(error)}") from error
    if record.format != _FORMAT:
        raise RequestError(f"{path} is of format {record.format}, and this version of ortlaunch reads {_FORMAT}")
    if record.kind != kind:
        raise RequestError(f"{folder} holds an export of kind {record.kind}: make one with ortlaunch export {kind}")
    try:
        record.inputs, record.outputs = _ports(values["inputs"]), _ports(values["outputs"])
    except (KeyError, TypeError) as error:
        raise RequestError(f"{path} cannot be read: its inputs or outputs lack a name, a type or a shape") from error
    return record


def _ports(stored: Any) -> list[Port]:
    return [Port(one["name"], one["dtype"], tuple(one["shape"])) for one in stored]
