"""The findings of ``ortlaunch check``, as written to its JSON; this module imports nothing heavy.

All keys are always present. A part that was not reached is null.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ortlaunch.ort.verify.comparison import TensorComparison

SCHEMA = 3
"""Incremented when a key changes its name or meaning."""

BEGUN = "begun.json"
"""File of the checking process with the report as it was before anything was computed."""

Status = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class TensorInfo:
    """Name, shape and type of a tensor."""

    name: str
    shape: list[int]
    dtype: str


@dataclass
class Structure:
    """Whether ORTModule accepts the model."""

    status: Status
    problems: list[str] = field(default_factory=list)
    parameters: int = 0
    """Number of values."""
    buffers: int = 0
    """Number of tensors."""
    unregistered: list[TensorInfo] = field(default_factory=list)
    """Tensors in plain attributes, which become constants of the graph."""
    inputs: list[TensorInfo] = field(default_factory=list)
    outputs: list[TensorInfo] = field(default_factory=list)


@dataclass(frozen=True)
class Operator:
    """An operator that cannot be exported, or that ONNX Runtime cannot run."""

    name: str
    module: str
    """Path of the module that contains the operator."""
    location: str
    statement: str


Effect = Literal["none", "decides_otherwise", "changes_outputs", "decided_by_chance"]


@dataclass(frozen=True)
class TracedStatement:
    """A statement that reads a tensor's value during the trace."""

    location: str
    statement: str
    message: str
    effect: Effect
    """none: the decision was the same for all probes; decides_otherwise: it was not, but the outputs agree.

    changes_outputs: outputs differ where the decision would; decided_by_chance: the decision is random in PyTorch.
    """


@dataclass(frozen=True)
class Probe:
    """One comparison of the exported graph with PyTorch on data that it was not traced with."""

    kind: Literal["fresh_data", "batch_size", "sequence_length"]
    shape: list[int]
    """Shape of the model's main input."""
    differs: bool
    output: str | None
    """The output with the largest error."""
    error: float | None
    message: str | None = None
    """ONNX Runtime's error, if it could not run the data."""
    own_graph: bool = False
    """Whether a run would make a graph for these sizes alone, which is right for them."""


@dataclass(frozen=True)
class Refused:
    """A difference from PyTorch for which a run refuses to start."""

    kind: str
    """The word for ``backend.allow``."""
    what: str
    advice: str


@dataclass
class Export:
    """The result of the export, and of the comparison of its graph with PyTorch."""

    status: Status
    succeeded: bool = False
    seconds: float | None = None
    error: str | None = None
    unsupported_operators: list[Operator] = field(default_factory=list)
    tracer_warnings: list[TracedStatement] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)
    comparable: bool = True
    """False if the model's outputs are random although dropout is off."""
    refused: list[Refused] = field(default_factory=list)
    """What the start of a run would refuse."""


@dataclass
class Parity:
    """The comparison of training steps with PyTorch's, with dropout off."""

    status: Status
    error: str | None = None
    steps: int = 0
    """Number of optimizer steps before parameters and buffers were compared."""
    loss: TensorComparison | None = None
    outputs: TensorComparison | None = None
    gradients: TensorComparison | None = None
    parameters: TensorComparison | None = None
    buffers: TensorComparison | None = None
    stale_buffers: list[str] = field(default_factory=list)
    """Buffers that change in PyTorch but not under ONNX Runtime."""


@dataclass
class Randomness:
    """The checks of random numbers under ONNX Runtime."""

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
    """The cost of one backend, measured by a trial."""

    step_seconds: float | None = None
    """Median of the steps after warm-up."""
    start_seconds: float | None = None
    """What export, compilation, the start check and slow first steps take beyond steady steps."""
    peak_memory_gib: float | None = None
    error: str | None = None


@dataclass
class Cost:
    """The cost of the backends on this device."""

    status: Status
    batch_size: int | None = None
    threads: int | None = None
    backends: dict[str, BackendCost] = field(default_factory=dict)
    export_seconds: float | None = None
    pays_off_after_steps: int | None = None
    """Steps after which ONNX Runtime has saved more time against eager than its export took; null if it never does."""


@dataclass(frozen=True)
class Ended:
    """How a signal has ended the process that checked the model."""

    signal: str
    where: str
    """In which part, and at which line of the model; empty if that is not known."""


@dataclass
class Report:
    """The complete report."""

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
    ended: Ended | None = None
    """Null unless a signal has ended the check itself."""
    schema: int = SCHEMA


def to_json(report: Report) -> dict[str, Any]:
    """Converts the report to JSON values; infinities and NaN become null, because JSON does not have them."""
    cleaned = _clean(asdict(report))
    assert isinstance(cleaned, dict)
    return cleaned


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _clean(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_clean(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
