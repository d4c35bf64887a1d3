"""What ``ortlaunch check`` found, as it stands in its JSON; imports nothing heavy.

Every key is always there; a part that could not be reached is null.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ortlaunch.ort.verify.comparison import TensorComparison

SCHEMA = 1
"""Raised when a key changes its name or meaning."""

Status = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class TensorInfo:
    """A tensor without its values."""

    name: str
    shape: list[int]
    dtype: str


@dataclass
class Structure:
    """Whether the model is something that ORTModule can take at all."""

    status: Status
    problems: list[str] = field(default_factory=list)
    parameters: int = 0
    """Number of values."""
    buffers: int = 0
    """Number of tensors."""
    unregistered: list[TensorInfo] = field(default_factory=list)
    """Tensors held as plain attributes: they are constants of the export."""
    inputs: list[TensorInfo] = field(default_factory=list)
    outputs: list[TensorInfo] = field(default_factory=list)


@dataclass(frozen=True)
class Operator:
    """An operator that cannot be exported, or that ONNX Runtime cannot run."""

    name: str
    module: str
    """Path of the module that calls it."""
    location: str
    statement: str


Effect = Literal["none", "decides_otherwise", "changes_outputs", "decided_by_chance"]


@dataclass(frozen=True)
class TracedStatement:
    """A statement that looks at a tensor's value while the model is traced."""

    location: str
    statement: str
    message: str
    effect: Effect
    """none: it decided the same for all probes; decides_otherwise: it did not, and outputs agree nevertheless."""


@dataclass(frozen=True)
class Probe:
    """One comparison of the exported graph with PyTorch on data that it was not traced with."""

    kind: Literal["fresh_data", "batch_size", "sequence_length"]
    shape: list[int]
    """Of the model's main input."""
    differs: bool
    output: str | None
    """The output with the largest error."""
    error: float | None
    message: str | None = None
    """What ONNX Runtime said, where it could not run it."""


@dataclass
class Export:
    """The export, and whether the graph means what the model means."""

    status: Status
    succeeded: bool = False
    seconds: float | None = None
    error: str | None = None
    unsupported_operators: list[Operator] = field(default_factory=list)
    tracer_warnings: list[TracedStatement] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)
    comparable: bool = True
    """False for a model whose outputs are random with dropout off too."""


@dataclass
class Parity:
    """Training against PyTorch's, dropout off."""

    status: Status
    error: str | None = None
    steps: int = 0
    """Optimizer steps after which parameters and buffers were compared."""
    loss: TensorComparison | None = None
    outputs: TensorComparison | None = None
    gradients: TensorComparison | None = None
    parameters: TensorComparison | None = None
    buffers: TensorComparison | None = None
    stale_buffers: list[str] = field(default_factory=list)
    """Buffers that moved in PyTorch and did not under ONNX Runtime."""


@dataclass
class Randomness:
    """Random numbers under ONNX Runtime."""

    status: Status
    problems: list[str] = field(default_factory=list)
    expected: bool = False
    """Whether the model is random in PyTorch in train mode."""
    active_in_train: bool = False
    differs_per_step: bool = False
    differs_per_rank: bool = False
    off_in_eval: bool = False
    eval_equals_eager: bool = False


@dataclass(frozen=True)
class BackendCost:
    """One backend in a process of its own."""

    step_seconds: float | None = None
    """Median of the steps after warm-up."""
    start_seconds: float | None = None
    """What the first step took longer than that: export or compilation."""
    peak_memory_gib: float | None = None
    error: str | None = None


@dataclass
class Cost:
    """What the backends cost on this device."""

    status: Status
    batch_size: int | None = None
    threads: int | None = None
    backends: dict[str, BackendCost] = field(default_factory=dict)
    export_seconds: float | None = None
    pays_off_after_steps: int | None = None
    """Steps after which ONNX Runtime's export has paid for itself against eager; null: it never does."""


@dataclass
class Report:
    """The page."""

    fit: bool
    verdict: str
    model: str
    data: str
    device: str
    precision: str
    versions: dict[str, str]
    structure: Structure
    export: Export | None = None
    parity: Parity | None = None
    randomness: Randomness | None = None
    cost: Cost | None = None
    schema: int = SCHEMA


def to_json(report: Report) -> dict[str, Any]:
    """The report as what JSON can hold: infinities and NaN, which it has not, become null."""
    cleaned = _clean(asdict(report))
    assert isinstance(cleaned, dict)
    return cleaned


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _clean(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_clean(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
