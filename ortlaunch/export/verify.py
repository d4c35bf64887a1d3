"""`ortlaunch export verify`: trains the artifacts and the PyTorch model on the same batches and compares them."""

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
from ortlaunch.export.source import built
from ortlaunch.export.trainers import ArtifactTrainer, TorchTrainer, TrainingBatch, training_batch
from ortlaunch.models.task import Batch
from ortlaunch.ort.artifacts import CHECKPOINT, Checkpoint
from ortlaunch.ort.runtime import Graph
from ortlaunch.trainer.prepare import first_batches

TOLERANCE = 1e-4
"""Largest allowed difference of two losses, and of two weights."""


@dataclass
class Verification:
    """The result of the comparison, written to verify.json."""

    ok: bool = False
    steps: int = 0
    batch_size: int = 0
    data: str = ""
    optimizer: dict[str, Any] = field(default_factory=dict)
    loss: str = ""
    losses: list[tuple[float, float]] = field(default_factory=list)
    """Losses of the artifacts and of PyTorch, per step."""
    loss_difference: float = math.inf
    weight_difference: float = math.inf
    weight: str = ""
    """The parameter with the largest difference."""
    left_to_chance: dict[str, int] = field(default_factory=dict)
    """For each parameter, how many values had a rounding error as their first gradient; these are not compared."""
    frozen_unchanged: bool = False
    dropout_active: bool | None = None
    """Whether dropout is active in the unchanged artifacts; None if the model has no dropout."""
    eval_loss_difference: float = math.inf
    """Difference in eval mode after the training, on a batch that was not used for training."""
    inference_error: float = math.inf
    """Error of the inference model that the device exports, over the largest output."""
    step_seconds: float = 0.0
    """Median time of the artifacts' steps on this CPU."""
    pytorch_step_seconds: float = 0.0
    threads: int = 1
    files: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def verify(folder: Path, *, steps: int, batch_size: int) -> Verification:
    """Trains both and compares them.

    Args:
        folder: an `export artifacts` folder; it is not changed.
        steps: number of training steps.
        batch_size: samples per step.

    Raises:
        RequestError: there are no artifacts, or the data cannot be loaded.
    """
    record, config = open_artifacts(folder)
    model = built(config)
    first = Checkpoint(folder / f"{record.prefix}{CHECKPOINT}")
    load_into(model, state_dict(folder, record, first), folder)
    batches = first_batches(config, batch_size, steps + 1, model, torch.device("cpu"))
    if len(batches) <= steps:
        raise RequestError(f"data={config.data.name} gives {len(batches)} batches: lower --steps or --batch-size")
    found = Verification(steps=steps, batch_size=batch_size, data=config.data.name, optimizer=record.optimizer)
    found.loss, found.files, found.threads = str(record.loss), record.files, torch.get_num_threads()
    with tempfile.TemporaryDirectory() as scratch:
        ort_trainer = ArtifactTrainer(folder, record, Path(scratch))
        found.dropout_active = ort_trainer.drops(training_batch(record, model, batches[0]))
        torch_trainer = TorchTrainer(model, record, config.optimizer)
        _train(found, ort_trainer, torch_trainer, [training_batch(record, model, batch) for batch in batches[:steps]])
        _compare_weights(found, ort_trainer.checkpoint.values(), torch_trainer)
        serves = _compare_trained(found, ort_trainer, torch_trainer, batches[steps], Path(scratch))
    found.problems = _problems(found, serves)
    found.ok = not found.problems
    return found


def _train(
    found: Verification, ort_trainer: ArtifactTrainer, torch_trainer: TorchTrainer, batches: list[TrainingBatch]
) -> None:
    seconds: tuple[list[float], list[float]] = ([], [])
    for batch in batches:
        pair = [
            _timed(step, batch, times)
            for step, times in zip((ort_trainer.step, torch_trainer.step), seconds, strict=True)
        ]
        found.losses.append((pair[0], pair[1]))
    differences = [abs(one - other) for one, other in found.losses]
    # `max` passes over a NaN that is not the first.
    found.loss_difference = math.nan if any(map(math.isnan, differences)) else max(differences)
    # The first quarter is warm-up.
    found.step_seconds, found.pytorch_step_seconds = (statistics.median(times[len(times) // 4 :]) for times in seconds)


def _timed(step: Callable[[TrainingBatch], float], batch: TrainingBatch, seconds: list[float]) -> float:
    begin = time.perf_counter()
    loss = step(batch)
    seconds.append(time.perf_counter() - begin)
    return loss


def _compare_weights(found: Verification, values: dict[str, np.ndarray[Any, Any]], torch_trainer: TorchTrainer) -> None:
    tensors = {**dict(torch_trainer.model.named_parameters()), **dict(torch_trainer.model.named_buffers())}
    chance = {name: where for name, where in torch_trainer.chance().items() if bool(where.any())}
    found.left_to_chance = {name: int(where.sum()) for name, where in chance.items()}
    found.weight_difference = 0.0
    for name, value in values.items():
        difference = (torch.from_numpy(value) - tensors[name].detach()).abs()
        if name in chance:
            difference = difference[~chance[name]]
        elif any(one.endswith("bias") for one in chance) and name.endswith("running_mean"):
            # This mean follows a bias that is not compared, and BatchNorm subtracts both.
            continue
        largest = float(difference.max()) if difference.numel() else 0.0
        # A NaN stays: no number is larger.
        if math.isnan(largest) or largest > found.weight_difference:
            found.weight_difference, found.weight = largest, name


def _compare_trained(
    found: Verification, ort_trainer: ArtifactTrainer, torch_trainer: TorchTrainer, fresh: Batch, scratch: Path
) -> bool:
    """Compares the trained checkpoint and the inference model exported from it with PyTorch, in eval mode.

    Returns:
        Whether the outputs of the inference model are PyTorch's.
    """
    record, folder = ort_trainer.record, ort_trainer.folder
    ort_trainer.checkpoint.save(scratch / "trained")
    model = torch_trainer.model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trained = Checkpoint(scratch / "trained")
    load_into(model, state_dict(folder, record, trained), folder)
    moved = set(record.statistics.values())
    frozen = [name for name in record.frozen if name not in moved]
    first = Checkpoint(folder / f"{record.prefix}{CHECKPOINT}").values()
    now = trained.values()
    found.frozen_unchanged = all(np.array_equal(first[name], now[name]) for name in frozen)
    model.eval()
    batch = training_batch(record, model, fresh)
    outputs = [port.name for port in record.outputs if port.name != "loss"]
    ort_trainer.export(scratch / "inference.onnx", outputs)
    with torch.no_grad():
        found.eval_loss_difference = abs(ort_trainer.evaluate(batch) - float(torch_trainer.loss(batch)))
        expected = {name: tensor for name, tensor in torch_trainer.outputs(batch).items() if name in outputs}
    actual = Graph(scratch / "inference.onnx")(batch.inputs)
    found.inference_error, _, differs = largest_error(actual, expected)
    model.load_state_dict(before)
    return not differs


def _problems(found: Verification, serves: bool) -> list[str]:
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


def to_json(verdict: Verification) -> dict[str, Any]:
    """Converts the result to JSON values."""
    return asdict(verdict)
