"""Generates and uses the artifacts of ONNX Runtime's on-device training; no other module imports that part of it."""

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
"""ONNX Runtime has two variants of AdamW, which differ in epsilon and weight decay; this one is PyTorch's."""
_WARNINGS_ALONE = 3


@dataclass(frozen=True)
class Plan:
    """What `generate` is to make."""

    trainable: Sequence[str]
    frozen: Sequence[str]
    """Parameters and buffers of the graph that get no gradient but are in the checkpoint."""
    loss: str | None
    """cross_entropy, mse or bce; None if the graph's own output is the loss."""
    loss_output: str
    """The output of the graph from which the loss is computed, or that is the loss."""
    further_outputs: Sequence[str]
    optimizer: DeviceOptimizer
    prefix: str
    nominal: bool


def generate(model: onnx.ModelProto, folder: Path, plan: Plan) -> None:
    """Writes the artifacts of a graph with ONNX Runtime's generator.

    Args:
        model: the forward graph, in memory.
        folder: the absolute path of the output folder, which also has the external data. No other process may use it
            yet, because ONNX Runtime writes and deletes a temp.onnx in the current folder.
        plan: what to generate.

    Raises:
        RequestError: ONNX Runtime cannot differentiate the graph.
    """
    from onnxruntime.training import artifacts
    from onnxruntime.training.onnxblock import optim

    onnxruntime.set_default_logger_severity(_WARNINGS_ALONE)
    loss = None if plan.loss is None else artifacts.LossType[_LOSSES[plan.loss]]
    # ONNX Runtime's checks and transformers get the graph without its weights. The code that writes the checkpoint
    # reads each weight from the external data, relative to the current folder.
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
    """Suppresses what native code writes to standard error: the name of each graph transformer.

    The log level has no effect on these lines. Errors are raised as exceptions and are not lost.
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
    """Changes an optimizer model in place so that it computes PyTorch's AdamW; SGD is the same in both."""
    for node in optimizer.graph.node:
        for attribute in node.attribute:
            if attribute.name == "adam_mode":
                attribute.i = _TORCHS_ADAM


class Checkpoint:
    """The parameters of on-device training, by name."""

    def __init__(self, path: Path) -> None:
        """Reads a checkpoint.

        Raises:
            RequestError: the file cannot be read.
        """
        from onnxruntime.training import api

        onnxruntime.set_default_logger_severity(_WARNINGS_ALONE)
        try:
            self.state = api.CheckpointState.load_checkpoint(str(path))
        except Exception as error:
            raise RequestError(f"{path} is no checkpoint that ONNX Runtime can read: {error}") from error

    def values(self) -> dict[str, Array]:
        """Returns all parameters, trainable or not."""
        return {name: np.array(parameter.data) for name, parameter in self.state.parameters}

    def gradients(self) -> dict[str, Array]:
        """Returns the gradients of the trainable parameters after the last pass."""
        return {name: np.array(one.grad) for name, one in self.state.parameters if one.requires_grad}

    def save(self, path: Path) -> None:
        """Writes the checkpoint with the state of the optimizer."""
        from onnxruntime.training import api

        api.CheckpointState.save_checkpoint(self.state, str(path), include_optimizer_state=True)


class Trainer:
    """Trains the artifacts as a device does."""

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
            folder: the folder of the artifacts.
            prefix: prefix of their file names.
            checkpoint: the parameters; training changes them.
            statistics: for each output with a new BatchNorm statistic, the parameter that receives it.
            training: a training model to use instead of the one in the folder.
            threads: number of threads of the session.
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
        """Sets the learning rate of the following steps."""
        self._optimizer.set_learning_rate(rate)

    def loss(self, *batch: Array) -> float:
        """Runs one pass in train mode with its gradients, and returns the loss; the next pass clears the gradients."""
        self._module.train()
        self._module.lazy_reset_grad()
        outputs = self._module(*batch)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        for position, name in self._moves:
            self._checkpoint.state.parameters[name] = outputs[position]
        return float(outputs[0])

    def step(self, *batch: Array) -> float:
        """Runs one training step and returns the loss before it."""
        loss = self.loss(*batch)
        self._optimizer.step()
        return loss

    def evaluate(self, *batch: Array) -> float:
        """Returns the loss in eval mode."""
        self._module.eval()
        outputs = self._module(*batch)
        return float(outputs[0] if isinstance(outputs, tuple) else outputs)

    def export(self, path: Path, outputs: Sequence[str]) -> None:
        """Writes the trained model with these outputs for inference."""
        self._module.export_model_for_inferencing(str(path), list(outputs))
