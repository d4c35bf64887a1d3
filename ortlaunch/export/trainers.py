"""Trains the same model twice for a comparison: the artifacts in ONNX Runtime, and the model in PyTorch."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ortlaunch.config.schema import OptimizerConfig
from ortlaunch.export import graph, losses
from ortlaunch.export.forward import LABELS, LOGITS, LOSS, Forward, find_forward, untouched
from ortlaunch.export.proofs import dropout_off
from ortlaunch.export.record import ExportRecord
from ortlaunch.models.task import Batch, make_task
from ortlaunch.ort.artifacts import CHECKPOINT, TRAINING, Checkpoint, Trainer
from ortlaunch.ort.verify.nested import NamedTensors

_ROUNDING = 1e-6
"""Share of the largest gradient. In fp32, smaller gradients are sums that have cancelled out."""


@dataclass(frozen=True)
class TrainingBatch:
    """A batch in the form that both trainers take."""

    inputs: Batch
    labels: torch.Tensor


def training_batch(record: ExportRecord, model: torch.nn.Module, batch: Batch) -> TrainingBatch:
    """Selects the tensors that the artifacts take, and converts the labels for their loss."""
    names = [port.name for port in record.inputs if port.name != LABELS]
    labels = batch[LABELS]
    if record.loss in ("mse", "bce"):
        given = {name: tensor for name, tensor in batch.items() if name != LABELS}
        with untouched(model), torch.no_grad():
            outputs = make_task(model, given).outputs(model, given)
        labels = losses.target(record.loss, Forward.named(outputs)[LOGITS], labels)
    return TrainingBatch({name: batch[name] for name in names}, labels)


class ArtifactTrainer:
    """Trains copies of the artifacts in a scratch folder, with dropout off."""

    def __init__(self, folder: Path, record: ExportRecord, scratch: Path) -> None:
        self.folder = folder
        self.record = record
        quiet = graph.without_dropout(graph.load(folder / f"{record.prefix}{TRAINING}"))
        graph.save_unchecked(quiet, scratch / TRAINING)
        self.checkpoint = self._fresh(scratch)
        self._trainer = self._trainer_of(self.checkpoint, scratch / TRAINING)
        self._trainer.set_learning_rate(record.optimizer["lr"])
        self._scratch = scratch

    def _fresh(self, scratch: Path) -> Checkpoint:
        name = f"{self.record.prefix}{CHECKPOINT}"
        path = scratch / name
        for file in self.folder.glob(f"{name}*"):
            shutil.copy(file, scratch / file.name)
        return Checkpoint(path)

    def _trainer_of(self, checkpoint: Checkpoint, training: Path | None) -> Trainer:
        record = self.record
        return Trainer(
            self.folder,
            record.prefix,
            checkpoint,
            record.statistics,
            training=training,
            threads=torch.get_num_threads(),
        )

    def drops(self, batch: TrainingBatch) -> bool | None:
        """Whether two passes over one batch differ with the unchanged artifacts; None if they contain no dropout."""
        if not self.record.findings.get("dropout"):
            return None
        trainer = self._trainer_of(self._fresh(self._scratch), None)
        return trainer.loss(*arrays(batch)) != trainer.loss(*arrays(batch))

    def step(self, batch: TrainingBatch) -> float:
        """Runs one training step and returns the loss before it."""
        return self._trainer.step(*arrays(batch))

    def gradients(self, batch: TrainingBatch) -> NamedTensors:
        """Returns the gradients of the trainable parameters after one pass."""
        self._trainer.loss(*arrays(batch))
        return {name: torch.from_numpy(value) for name, value in self.checkpoint.gradients().items()}

    def evaluate(self, batch: TrainingBatch) -> float:
        """Returns the loss in eval mode."""
        return self._trainer.evaluate(*arrays(batch))

    def export(self, path: Path, outputs: list[str]) -> None:
        """Writes the trained model for inference."""
        self._trainer.export(path, outputs)


def arrays(batch: TrainingBatch) -> list[np.ndarray[Any, Any]]:
    return [tensor.numpy() for tensor in (*batch.inputs.values(), batch.labels)]


class TorchTrainer:
    """Trains the model in PyTorch, in train mode with dropout off."""

    def __init__(self, model: torch.nn.Module, record: ExportRecord, cfg: OptimizerConfig) -> None:
        self.model = model.train()
        self.record = record
        trainable = set(record.trainable)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trainable)
        chosen = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = cfg.build([{"params": chosen, "weight_decay": cfg.weight_decay}])
        self._forward: Forward | None = None
        self._top = 0.0
        """The largest gradient of all values in all steps."""
        self._first: NamedTensors = {}
        """The gradient of each value in the first step in which it had one."""

    def loss(self, batch: TrainingBatch) -> torch.Tensor:
        """Computes the loss in the model's current mode."""
        outputs = self.outputs(batch)
        return losses.in_pytorch(str(self.record.loss), outputs, batch.labels)

    def outputs(self, batch: TrainingBatch) -> dict[str, torch.Tensor]:
        given = batch.inputs | ({LABELS: batch.labels} if self.record.loss == "own" else {})
        if self._forward is None:
            self._forward = find_forward(self.model, given, with_labels=self.record.loss == "own")
        # `named_tensors` is not used here, because it detaches.
        raw = self._forward.task.outputs(self.model, given)
        return _attached(raw)

    def gradients(self, batch: TrainingBatch) -> NamedTensors:
        """Returns the gradients of the trainable parameters after one pass."""
        chosen = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        with untouched(self.model):
            with dropout_off():
                loss = self.loss(batch)
            # This comes before the buffers are restored, because the backward reads them.
            found = torch.autograd.grad(loss, list(chosen.values()), allow_unused=True)
        pairs = zip(chosen.items(), found, strict=True)
        return {name: torch.zeros_like(one) if gradient is None else gradient for (name, one), gradient in pairs}

    def step(self, batch: TrainingBatch) -> float:
        """Runs one training step and returns the loss before it."""
        with dropout_off():
            loss = self.loss(batch)
        self._optimizer.zero_grad()
        loss.backward()
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                size = parameter.grad.abs()
                self._top = max(self._top, float(size.max()))
                first = self._first.get(name, torch.zeros_like(size))
                self._first[name] = torch.where(first > 0, first, size)
        self._optimizer.step()
        return float(loss.detach())

    def chance(self) -> dict[str, torch.Tensor]:
        """Marks the values of each parameter whose first gradient was no more than a rounding error.

        A bias before a BatchNorm, or of attention keys, never has another gradient. AdamW divides a gradient by the
        size of those so far, so that it makes a full step from a first one of any size, and later ones do not undo it.

        Returns:
            For each parameter, booleans of its shape.
        """
        return {name: (size > 0) & (size < _ROUNDING * self._top) for name, size in self._first.items()}


def _attached(outputs: Any) -> dict[str, torch.Tensor]:
    """Returns a model's outputs by name, without detaching them."""
    if isinstance(outputs, torch.Tensor):
        return {LOSS if outputs.dim() == 0 else LOGITS: outputs}
    if isinstance(outputs, tuple | list):
        return {LOSS if outputs[0].dim() == 0 else LOGITS: outputs[0]}
    return {str(name): tensor for name, tensor in outputs.items() if isinstance(tensor, torch.Tensor)}
