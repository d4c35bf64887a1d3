"""ONNX Runtime's training on a device: its artifacts, made and used; all that touches that part of it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import DeviceOptimizer
from ortlaunch.ort.quiet import onnxruntime

Array = NDArray[np.generic]

TRAINING, EVAL, OPTIMIZER = "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"
CHECKPOINT, NOMINAL = "checkpoint", "nominal_checkpoint"

_LOSSES = {"cross_entropy": "CrossEntropyLoss", "mse": "MSELoss", "bce": "BCEWithLogitsLoss"}
_TORCHS_ADAM = 0
"""ONNX Runtime knows two AdamWs, by where epsilon and the decay come in; this one is PyTorch's."""
_WARNINGS_ALONE = 3


@dataclass(frozen=True)
class Plan:
    """What artifacts are to be like."""

    trainable: Sequence[str]
    frozen: Sequence[str]
    """Parameters and buffers of the graph that get no gradient, and are in the checkpoint."""
    loss: str | None
    """cross_entropy, mse or bce; None where the graph's own output is the loss."""
    loss_output: str
    """The graph's output that the loss is computed from, or that is the loss."""
    further_outputs: Sequence[str]
    optimizer: DeviceOptimizer
    prefix: str
    nominal: bool


def generate(model: onnx.ModelProto, folder: Path, plan: Plan) -> None:
    """Writes the artifacts of a graph, as ONNX Runtime makes them.

    Args:
        model: the forward graph in memory.
        folder: where to, an absolute path, and where the weights lie that the graph has not itself; one that is being
            made, because ONNX Runtime's blocks write, and take away again, a temp.onnx in the folder of work.
        plan: what they are to be like.

    Raises:
        RequestError: ONNX Runtime cannot differentiate the graph.
    """
    from onnxruntime.training import artifacts
    from onnxruntime.training.onnxblock import optim

    onnxruntime.set_default_logger_severity(_WARNINGS_ALONE)
    loss = None if plan.loss is None else artifacts.LossType[_LOSSES[plan.loss]]
    # A graph without its weights is all that its checks and transformers see; what writes the checkpoint reads each
    # weight where the tensor says, beside the folder of work.
    with contextlib.chdir(folder), _silence():
        try:
            artifacts.generate_artifacts(
                model,
                requires_grad=list(plan.trainable),
                frozen_params=list(plan.frozen),
                loss=loss,
                optimizer=getattr(optim, plan.optimizer.block)(**plan.optimizer.arguments),
                artifact_directory=folder,
                prefix=plan.prefix,
                nominal_checkpoint=plan.nominal,
                additional_output_names=list(plan.further_outputs) or None,
                loss_input_names=[plan.loss_output],
            )
        except Exception as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            why = lines[-1] if lines else type(error).__name__
            raise RequestError(f"ONNX Runtime cannot make training artifacts of this model: {why}") from error


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Within it, what native code writes to standard error is lost: each of its graph transformers, one by one.

    Its log level does not reach there. What goes wrong comes as an exception all the same.
    """
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def as_pytorch(optimizer: onnx.ModelProto) -> None:
    """Makes an optimizer model compute PyTorch's AdamW, in place; SGD is the same in both."""
    for node in optimizer.graph.node:
        for attribute in node.attribute:
            if attribute.name == "adam_mode":
                attribute.i = _TORCHS_ADAM


class Checkpoint:
    """The parameters on a device, by name."""

    def __init__(self, path: Path) -> None:
        """Reads a checkpoint.

        Raises:
            RequestError: it cannot be read.
        """
        from onnxruntime.training import api

        onnxruntime.set_default_logger_severity(_WARNINGS_ALONE)
        try:
            self.state = api.CheckpointState.load_checkpoint(str(path))
        except Exception as error:
            raise RequestError(f"{path} is no checkpoint that ONNX Runtime can read: {error}") from error

    def values(self) -> dict[str, Array]:
        """Every parameter in it, trainable or not."""
        return {name: np.array(parameter.data) for name, parameter in self.state.parameters}

    def gradients(self) -> dict[str, Array]:
        """Of the trainable parameters, as the last pass has left them."""
        return {name: np.array(one.grad) for name, one in self.state.parameters if one.requires_grad}

    def save(self, path: Path) -> None:
        """Writes it, with the optimizer's state."""
        from onnxruntime.training import api

        api.CheckpointState.save_checkpoint(self.state, str(path), include_optimizer_state=True)


class Trainer:
    """Trains artifacts as a device does."""

    def __init__(
        self,
        folder: Path,
        prefix: str,
        checkpoint: Checkpoint,
        statistics: Mapping[str, str],
        *,
        training: Path | None = None,
        threads: int = 1,
    ) -> None:
        """
        Args:
            folder: the artifacts.
            prefix: of their names.
            checkpoint: the parameters, which training changes.
            statistics: which outputs of the training model become which parameters after a step.
            training: a training model to use instead of the folder's.
            threads: of the session's pool.
        """
        from onnxruntime.training import api

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = _WARNINGS_ALONE
        self._checkpoint = checkpoint
        self._module = api.Module(
            str(training or folder / f"{prefix}{TRAINING}"),
            checkpoint.state,
            str(folder / f"{prefix}{EVAL}"),
            session_options=options,
        )
        self._optimizer = api.Optimizer(str(folder / f"{prefix}{OPTIMIZER}"), self._module)
        self.inputs: tuple[str, ...] = tuple(self._module.input_names())
        outputs = self._module.output_names()
        self._moves = [(position, statistics[name]) for position, name in enumerate(outputs) if name in statistics]

    def set_learning_rate(self, rate: float) -> None:
        """Sets it for the steps to come."""
        self._optimizer.set_learning_rate(rate)

    def loss(self, *batch: Array) -> float:
        """One pass in train mode and its gradients, which the next one starts anew."""
        self._module.train()
        self._module.lazy_reset_grad()
        outputs = self._module(*batch)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        for position, name in self._moves:
            self._checkpoint.state.parameters[name] = outputs[position]
        return float(outputs[0])

    def step(self, *batch: Array) -> float:
        """One step of training; the loss before it."""
        loss = self.loss(*batch)
        self._optimizer.step()
        return loss

    def evaluate(self, *batch: Array) -> float:
        """The loss in eval mode."""
        self._module.eval()
        outputs = self._module(*batch)
        return float(outputs[0] if isinstance(outputs, tuple) else outputs)

    def export(self, path: Path, outputs: Sequence[str]) -> None:
        """Writes the trained model for inference, with these outputs."""
        self._module.export_model_for_inferencing(str(path), list(outputs))
