"""`ortlaunch export verify`: artifacts and PyTorch trained side by side on the same batches."""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ortlaunch.config.schema import AdamWConfig, Config
from ortlaunch.errors import RequestError
from ortlaunch.export import graph, losses
from ortlaunch.export.forward import LABELS, LOGITS, Forward, find_forward, untouched
from ortlaunch.export.proofs import dropout_off, largest_error
from ortlaunch.export.record import Record
from ortlaunch.export.restore import load_into, open_artifacts, state_dict
from ortlaunch.export.source import built
from ortlaunch.ort.artifacts import CHECKPOINT, TRAINING, Checkpoint, Trainer
from ortlaunch.ort.check.prepare import first_batches
from ortlaunch.ort.runtime import Graph
from ortlaunch.trainer.task import Batch

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
        device = _Device(folder, record, Path(scratch))
        found.dropout_active = device.drops(_fed(record, model, batches[0]))
        side = _Beside(model, record, config)
        _train(found, device, side, [_fed(record, model, batch) for batch in batches[:steps]])
        _compare_weights(found, device.checkpoint.values(), side)
        _compare_trained(found, device, side, batches[steps], Path(scratch))
    found.problems = list(_problems(found))
    found.ok = not found.problems
    return found


@dataclass(frozen=True)
class _Fed:
    """A batch as both sides take it."""

    inputs: Batch
    labels: torch.Tensor


def _fed(record: Record, model: torch.nn.Module, batch: Batch) -> _Fed:
    names = [port.name for port in record.inputs if port.name != LABELS]
    labels = batch[LABELS]
    if record.loss in ("mse", "bce"):
        with untouched(model), torch.no_grad():
            forward = find_forward(model, batch, with_labels=False)
            labels = losses.target(record.loss, forward(model, batch)[LOGITS], labels)
    return _Fed({name: batch[name] for name in names}, labels)


class _Device:
    """The artifacts, trained in a folder of their own with dropout off."""

    def __init__(self, folder: Path, record: Record, scratch: Path) -> None:
        self._folder = folder
        self._record = record
        quiet = graph.without_dropout(graph.load(folder / f"{record.prefix}{TRAINING}"))
        graph.save_unchecked(quiet, scratch / TRAINING)
        self.checkpoint = self._fresh(scratch)
        self._trainer = self._trainer_of(self.checkpoint, scratch / TRAINING)
        self._trainer.set_learning_rate(record.optimizer["lr"])
        self._scratch = scratch

    def _fresh(self, scratch: Path) -> Checkpoint:
        name = f"{self._record.prefix}{CHECKPOINT}"
        path = scratch / name
        for file in self._folder.glob(f"{name}*"):
            shutil.copy(file, scratch / file.name)
        return Checkpoint(path)

    def _trainer_of(self, checkpoint: Checkpoint, training: Path | None) -> Trainer:
        record = self._record
        return Trainer(
            self._folder,
            record.prefix,
            checkpoint,
            record.statistics,
            training=training,
            threads=torch.get_num_threads(),
        )

    def drops(self, fed: _Fed) -> bool | None:
        """Whether two passes of the artifacts as they are over one batch differ; None without dropout in them."""
        if not self._record.findings.get("dropout"):
            return None
        trainer = self._trainer_of(self._fresh(self._scratch), None)
        return trainer.loss(*_arrays(fed)) != trainer.loss(*_arrays(fed))

    def step(self, fed: _Fed) -> float:
        """One step; the loss before it."""
        return self._trainer.step(*_arrays(fed))

    def evaluate(self, fed: _Fed) -> float:
        """The loss in eval mode."""
        return self._trainer.evaluate(*_arrays(fed))

    def export(self, path: Path, outputs: list[str]) -> None:
        """Writes the trained model for inference."""
        self._trainer.export(path, outputs)


def _arrays(fed: _Fed) -> list[np.ndarray[Any, Any]]:
    return [tensor.numpy() for tensor in (*fed.inputs.values(), fed.labels)]


class _Beside:
    """The same in PyTorch, in train mode with dropout off."""

    def __init__(self, model: torch.nn.Module, record: Record, config: Config) -> None:
        self.model = model.train()
        self._record = record
        trainable = set(record.trainable)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trainable)
        chosen = [parameter for parameter in model.parameters() if parameter.requires_grad]
        cfg = config.optimizer
        if isinstance(cfg, AdamWConfig):
            betas = (cfg.beta1, cfg.beta2)
            self._optimizer: torch.optim.Optimizer = torch.optim.AdamW(
                chosen, lr=cfg.lr, betas=betas, eps=cfg.eps, weight_decay=cfg.weight_decay
            )
        else:
            self._optimizer = torch.optim.SGD(chosen, lr=cfg.lr)
        self._forward: Forward | None = None

    def loss(self, fed: _Fed) -> torch.Tensor:
        """The loss in the mode that the model is in."""
        outputs = self._outputs(fed)
        return losses.in_pytorch(str(self._record.loss), outputs, fed.labels)

    def _outputs(self, fed: _Fed) -> dict[str, torch.Tensor]:
        batch = fed.inputs | ({LABELS: fed.labels} if self._record.loss == "own" else {})
        if self._forward is None:
            self._forward = find_forward(self.model, batch, with_labels=self._record.loss == "own")
        # Not by `named_tensors`, which detaches.
        raw = self._forward.task.outputs(self.model, batch)
        return _attached(raw)

    def step(self, fed: _Fed) -> float:
        """One step; the loss before it."""
        with dropout_off():
            loss = self.loss(fed)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())


def _attached(outputs: Any) -> dict[str, torch.Tensor]:
    """A model's outputs by name, with their gradients."""
    if isinstance(outputs, torch.Tensor):
        return {"loss" if outputs.dim() == 0 else LOGITS: outputs}
    if isinstance(outputs, tuple | list):
        return {"loss" if outputs[0].dim() == 0 else LOGITS: outputs[0]}
    return {str(name): tensor for name, tensor in outputs.items() if isinstance(tensor, torch.Tensor)}


def _train(found: Verdict, device: _Device, side: _Beside, batches: list[_Fed]) -> None:
    seconds: tuple[list[float], list[float]] = ([], [])
    for fed in batches:
        pair = [_timed(step, fed, times) for step, times in zip((device.step, side.step), seconds, strict=True)]
        found.losses.append((pair[0], pair[1]))
    found.loss_difference = max(abs(one - other) for one, other in found.losses)
    # The first steps warm up.
    found.step_seconds, found.pytorch_step_seconds = (statistics.median(times[len(times) // 4 :]) for times in seconds)


def _timed(step: Callable[[_Fed], float], fed: _Fed, seconds: list[float]) -> float:
    begin = time.perf_counter()
    loss = step(fed)
    seconds.append(time.perf_counter() - begin)
    return loss


def _compare_weights(found: Verdict, values: dict[str, np.ndarray[Any, Any]], side: _Beside) -> None:
    tensors = {**dict(side.model.named_parameters()), **dict(side.model.named_buffers())}
    found.weight_difference = 0.0
    for name, value in values.items():
        difference = float((torch.from_numpy(value) - tensors[name].detach()).abs().max())
        if not difference <= found.weight_difference:
            found.weight_difference, found.weight = difference, name


def _compare_trained(found: Verdict, device: _Device, side: _Beside, fresh: Batch, scratch: Path) -> None:
    """The trained checkpoint in PyTorch, and the inference model that the device exports, in eval mode."""
    record, folder = device._record, device._folder
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
    fed = _fed(record, model, fresh)
    outputs = [port.name for port in record.outputs if port.name != "loss"]
    device.export(scratch / "inference.onnx", outputs)
    with torch.no_grad():
        found.eval_loss_difference = abs(device.evaluate(fed) - float(side.loss(fed)))
        expected = {name: tensor for name, tensor in side._outputs(fed).items() if name in outputs}
    actual = Graph(scratch / "inference.onnx")(fed.inputs)
    found.inference_error, _, differs = largest_error(actual, expected)
    if differs:
        found.problems.append("inference")
    model.load_state_dict(before)


def _problems(found: Verdict) -> list[str]:
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
    if found.problems:
        problems.append(f"the inference model's outputs differ by {found.inference_error:.1e}")
    return problems


def to_json(verdict: Verdict) -> dict[str, Any]:
    """The verdict as JSON takes it."""
    return asdict(verdict)
