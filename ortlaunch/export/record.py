"""`export.json`: what an export made of what, so that others can use it and `export verify` can repeat it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ortlaunch.base.errors import RequestError

RECORD = "export.json"
CONFIG = "config.yaml"
REST = "rest.safetensors"
"""What the model has and the graph has not: counters, parameters that the forward does not use."""
_FORMAT = 1


@dataclass(frozen=True)
class Port:
    """An input or output of the graph."""

    name: str
    dtype: str
    """As numpy calls it."""
    shape: tuple[int | str, ...]
    """A name stands for a size that may vary."""


@dataclass
class Record:
    """What an export has left."""

    kind: str
    """onnx, artifacts or inference."""
    model: str
    """Its file's name."""
    inputs: list[Port]
    outputs: list[Port]
    loss: str | None
    """own, cross_entropy, mse or bce; None where there is none in the files."""
    ortlaunch: str
    ir_version: int
    opset: int
    weights: str
    """Where they come from, in words."""
    run_dir: str | None = None
    files: dict[str, int] = field(default_factory=dict)
    """Sizes in bytes."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Further names of tied weights, and the name under which the graph has them."""
    statistics: dict[str, str] = field(default_factory=dict)
    """Outputs of the training model by which a step moves BatchNorm's statistics, and the parameters to put them in."""
    prefix: str = ""
    trainable: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    optimizer: dict[str, Any] = field(default_factory=dict)
    findings: dict[str, Any] = field(default_factory=dict)
    """What was proven of the files, with figures."""
    format: int = _FORMAT

    def save(self, folder: Path) -> None:
        """Writes it, with the sizes of the files that lie there."""
        self.files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != RECORD}
        (folder / RECORD).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")


def load_record(folder: Path, kind: str) -> Record:
    """Reads what an export of this kind has left.

    Raises:
        RequestError: there is none, or of another kind or version.
    """
    path = folder / RECORD
    try:
        values = json.loads(path.read_text())
        record = Record(**values)
    except FileNotFoundError:
        raise RequestError(f"{folder} holds no export: it has no {RECORD}") from None
    except (OSError, ValueError, TypeError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from error
    if record.format != _FORMAT:
        raise RequestError(f"{path} is of format {record.format}, and this version of ortlaunch reads {_FORMAT}")
    if record.kind != kind:
        raise RequestError(f"{folder} holds an export of kind {record.kind}: make one with ortlaunch export {kind}")
    for name in ("inputs", "outputs"):
        setattr(record, name, [Port(one["name"], one["dtype"], tuple(one["shape"])) for one in getattr(record, name)])
    return record
