"""`ortlaunch export verify`: artifacts and PyTorch trained side by side on the same batches."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.export.proofs import largest_error
from ortlaunch.export.restore import load_into, open_artifacts, state_dict
from ortlaunch.export.sides import Beside, Device, Fed, fed_of
from ortlaunch.export.source import built
from ortlaunch.models.task import Batch
from ortlaunch.ort.artifacts import CHECKPOINT, Checkpoint
from ortlaunch.ort.runtime import Graph
from ortlaunch.trainer.prepare import first_batches

TOLERANCE = 1e-4
"""Largest difference of two losses, and of two weights."""


@dataclass
class Verdict:
    """What came out."""

    ok: bool = False
    steps: int = 0
    batch_size: int = 0
    data: str = ""
    optimizer: dict[str, Any] = field(default_factory=dict)
    loss: str = ""
    losses: list[tuple[float, float]] = field(default_factory=list)
    """Of the artifacts and of PyTorch, step by step."""
    loss_difference: float = math.inf
    weight_difference: float = math.inf
    weight: str = ""
    """The parameter that has it."""
    left_to_chance: dict[str, int] = field(default_factory=dict)
    """How many values of a parameter had rounding errors for gradients, and are not compared."""
    frozen_unchanged: bool = False
    dropout_active: bool | None = None
    """Whether the artifacts, as they are, drop at random; None where the model has no dropout."""
    eval_loss_difference: float = math.inf
    """In eval mode after the training, on a batch that was not trained on."""
    inference_error: float = math.inf
    """Of the inference model that the device exports, over the largest output."""
    step_seconds: float = 0.0
    """Median of the artifacts' steps on this CPU."""
    pytorch_step_seconds: float = 0.0
    threads: int = 1
    files: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def verify(folder: Path, *, steps: int, batch_size: int) -> Verdict:
    """Trains both and compares.

    Args:
        folder: what `export artifacts` has left; nothing in it is changed.
        steps: of training.
        batch_size: samples in each.

    Raises:
        RequestError: there are no artifacts, or the data is not there.
    """
    record, config = open_artifacts(folder)
    model = built(config)
    first = Checkpoint(folder / f"{record.prefix}{CHECKPOINT}")
    load_into(model, state_dict(folder, record, first), folder)
    batches = first_batches(config, batch_size, steps + 1, model, torch.device("cpu"))
    if len(batches) <= steps:
        raise RequestError(f"data={config.data.name} gives {len(batches)} batches: lower --steps or --batch-size")
    found = Verdict(steps=steps, batch_size=batch_size, data=config.data.name, optimizer=record.optimizer)
    found.loss, found.files, found.threads = str(record.loss), record.files, torch.get_num_threads()
    with tempfile.TemporaryDirectory() as scratch:
        device = Device(folder, record, Path(scratch))
        found.dropout_active = device.drops(fed_of(record, model, batches[0]))
        side = Beside(model, record, config.optimizer)
        _train(found, device, side, [fed_of(record, model, batch) for batch in batches[:steps]])
        _compare_weights(found, device.checkpoint.values(), side)
        serves = _compare_trained(found, device, side, batches[steps], Path(scratch))
    found.problems = _problems(found, serves)
    found.ok = not found.problems
    return found


def _train(found: Verdict, device: Device, side: Beside, batches: list[Fed]) -> None:
    seconds: tuple[list[float], list[float]] = ([], [])
    for fed in batches:
        pair = [_timed(step, fed, times) for step, times in zip((device.step, side.step), seconds, strict=True)]
        found.losses.append((pair[0], pair[1]))
    found.loss_difference = max(abs(one - other) for one, other in found.losses)
    # The first steps warm up.
    found.step_seconds, found.pytorch_step_seconds = (statistics.median(times[len(times) // 4 :]) for times in seconds)


def _timed(step: Callable[[Fed], float], fed: Fed, seconds: list[float]) -> float:
    begin = time.perf_counter()
    loss = step(fed)
    seconds.append(time.perf_counter() - begin)
    return loss


def _compare_weights(found: Verdict, values: dict[str, np.ndarray[Any, Any]], side: Beside) -> None:
    tensors = {**dict(side.model.named_parameters()), **dict(side.model.named_buffers())}
    chance = {name: where for name, where in side.chance().items() if bool(where.any())}
    found.left_to_chance = {name: int(where.sum()) for name, where in chance.items()}
    found.weight_difference = 0.0
    for name, value in values.items():
        difference = (torch.from_numpy(value) - tensors[name].detach()).abs()
        if name in chance:
            difference = difference[~chance[name]]
        elif any(one.endswith("bias") for one in chance) and name.endswith("running_mean"):
            # It follows a bias that is left to chance, which BatchNorm takes away again.
            continue
        largest = float(difference.max()) if difference.numel() else 0.0
        if not largest <= found.weight_difference:
            found.weight_difference, found.weight = largest, name


def _compare_trained(found: Verdict, device: Device, side: Beside, fresh: Batch, scratch: Path) -> bool:
    """The trained checkpoint in PyTorch, and the inference model that the device exports, in eval mode.

    Returns:
        Whether that model's outputs are PyTorch's.
    """
    record, folder = device.record, device.folder
    device.checkpoint.save(scratch / "trained")
    model = side.model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trained = Checkpoint(scratch / "trained")
    load_into(model, state_dict(folder, record, trained), folder)
    moved = set(record.statistics.values())
    frozen = [name for name in record.frozen if name not in moved]
    first = Checkpoint(folder / f"{record.prefix}{CHECKPOINT}").values()
    now = trained.values()
    found.frozen_unchanged = all(np.array_equal(first[name], now[name]) for name in frozen)
    model.eval()
    fed = fed_of(record, model, fresh)
    outputs = [port.name for port in record.outputs if port.name != "loss"]
    device.export(scratch / "inference.onnx", outputs)
    with torch.no_grad():
        found.eval_loss_difference = abs(device.evaluate(fed) - float(side.loss(fed)))
        expected = {name: tensor for name, tensor in side.outputs(fed).items() if name in outputs}
    actual = Graph(scratch / "inference.onnx")(fed.inputs)
    found.inference_error, _, differs = largest_error(actual, expected)
    model.load_state_dict(before)
    return not differs


def _problems(found: Verdict, serves: bool) -> list[str]:
    problems = []
    if not found.loss_difference <= TOLERANCE:
        problems.append(f"losses differ by {found.loss_difference:.1e}")
    if not found.weight_difference <= TOLERANCE:
        problems.append(f"{found.weight} differs by {found.weight_difference:.1e} after the training")
    if not found.frozen_unchanged:
        problems.append("frozen parameters have changed")
    if found.dropout_active is False:
        problems.append("dropout does nothing in the training model")
    if not found.eval_loss_difference <= TOLERANCE:
        problems.append(f"losses in eval mode differ by {found.eval_loss_difference:.1e}")
    if not serves:
        problems.append(f"the inference model's outputs differ by {found.inference_error:.1e}")
    return problems


def to_json(verdict: Verdict) -> dict[str, Any]:
    """The verdict as JSON takes it."""
    return asdict(verdict)
