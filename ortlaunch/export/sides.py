"""The two sides of a comparison: artifacts in ONNX Runtime's training, and the same model in PyTorch."""

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
from ortlaunch.export.record import Record
from ortlaunch.models.task import Batch, make_task
from ortlaunch.ort.artifacts import CHECKPOINT, TRAINING, Checkpoint, Trainer
from ortlaunch.ort.verify.nested import NamedTensors

_ROUNDING = 1e-6
"""Of the largest gradient: in fp32, smaller ones are sums that have cancelled out."""


@dataclass(frozen=True)
class Fed:
    """A batch as both sides take it."""

    inputs: Batch
    labels: torch.Tensor


def fed_of(record: Record, model: torch.nn.Module, batch: Batch) -> Fed:
    """What the artifacts' inputs take of a batch, and the labels as their loss takes them."""
    names = [port.name for port in record.inputs if port.name != LABELS]
    labels = batch[LABELS]
    if record.loss in ("mse", "bce"):
        given = {name: tensor for name, tensor in batch.items() if name != LABELS}
        with untouched(model), torch.no_grad():
            outputs = make_task(model, given).outputs(model, given)
        labels = losses.target(record.loss, Forward.named(outputs)[LOGITS], labels)
    return Fed({name: batch[name] for name in names}, labels)


class Device:
    """The artifacts, trained in a folder of their own with dropout off."""

    def __init__(self, folder: Path, record: Record, scratch: Path) -> None:
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

    def drops(self, fed: Fed) -> bool | None:
        """Whether two passes of the artifacts as they are over one batch differ; None without dropout in them."""
        if not self.record.findings.get("dropout"):
            return None
        trainer = self._trainer_of(self._fresh(self._scratch), None)
        return trainer.loss(*arrays(fed)) != trainer.loss(*arrays(fed))

    def step(self, fed: Fed) -> float:
        """One step; the loss before it."""
        return self._trainer.step(*arrays(fed))

    def gradients(self, fed: Fed) -> NamedTensors:
        """Of the trainable parameters, after one pass."""
        self._trainer.loss(*arrays(fed))
        return {name: torch.from_numpy(value) for name, value in self.checkpoint.gradients().items()}

    def evaluate(self, fed: Fed) -> float:
        """The loss in eval mode."""
        return self._trainer.evaluate(*arrays(fed))

    def export(self, path: Path, outputs: list[str]) -> None:
        """Writes the trained model for inference."""
        self._trainer.export(path, outputs)


def arrays(fed: Fed) -> list[np.ndarray[Any, Any]]:
    return [tensor.numpy() for tensor in (*fed.inputs.values(), fed.labels)]


class Beside:
    """The same in PyTorch, in train mode with dropout off."""

    def __init__(self, model: torch.nn.Module, record: Record, cfg: OptimizerConfig) -> None:
        self.model = model.train()
        self.record = record
        trainable = set(record.trainable)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trainable)
        chosen = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = cfg.build([{"params": chosen, "weight_decay": cfg.weight_decay}])
        self._forward: Forward | None = None
        self._largest: NamedTensors = {}

    def loss(self, fed: Fed) -> torch.Tensor:
        """The loss in the mode that the model is in."""
        outputs = self.outputs(fed)
        return losses.in_pytorch(str(self.record.loss), outputs, fed.labels)

    def outputs(self, fed: Fed) -> dict[str, torch.Tensor]:
        batch = fed.inputs | ({LABELS: fed.labels} if self.record.loss == "own" else {})
        if self._forward is None:
            self._forward = find_forward(self.model, batch, with_labels=self.record.loss == "own")
        # Not by `named_tensors`, which detaches.
        raw = self._forward.task.outputs(self.model, batch)
        return _attached(raw)

    def gradients(self, fed: Fed) -> NamedTensors:
        """Of the trainable parameters, after one pass."""
        chosen = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        with untouched(self.model):
            with dropout_off():
                loss = self.loss(fed)
            # Before the buffers are put back: the backward reads them.
            found = torch.autograd.grad(loss, list(chosen.values()), allow_unused=True)
        pairs = zip(chosen.items(), found, strict=True)
        return {name: torch.zeros_like(one) if gradient is None else gradient for (name, one), gradient in pairs}

    def step(self, fed: Fed) -> float:
        """One step; the loss before it."""
        with dropout_off():
            loss = self.loss(fed)
        self._optimizer.zero_grad()
        loss.backward()
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                size = parameter.grad.abs()
                self._largest[name] = torch.maximum(self._largest[name], size) if name in self._largest else size
        self._optimizer.step()
        return float(loss.detach())

    def chance(self) -> dict[str, torch.Tensor]:
        """Where a parameter's gradient has never been more than rounding errors, as booleans of its shape.

        A bias before a BatchNorm, or of attention keys, has no gradient but these, and AdamW makes full steps of them.
        """
        top = max((float(size.max()) for size in self._largest.values()), default=0.0)
        return {name: (size > 0) & (size < _ROUNDING * top) for name, size in self._largest.items()}


def _attached(outputs: Any) -> dict[str, torch.Tensor]:
    """A model's outputs by name, with their gradients."""
    if isinstance(outputs, torch.Tensor):
        return {LOSS if outputs.dim() == 0 else LOGITS: outputs}
    if isinstance(outputs, tuple | list):
        return {LOSS if outputs[0].dim() == 0 else LOGITS: outputs[0]}
    return {str(name): tensor for name, tensor in outputs.items() if isinstance(tensor, torch.Tensor)}
