"""The forward pass of a model as a graph has it: named tensors go in, named tensors come out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.export.record import Port
from ortlaunch.models.task import Batch, Task, make_task
from ortlaunch.ort.verify.nested import NamedTensors, foreign_values, named_tensors
from ortlaunch.ort.verify.state import ModelState

LABELS = "labels"
LOSS = "loss"
LOGITS = "logits"
_AXES = ("batch", "sequence")


@dataclass(frozen=True)
class Forward:
    """How a model is called, and which tensors it returns.

    Attributes:
        inputs: names of the tensors of a batch that are passed in, in the order of the graph's inputs.
        outputs: names of the returned tensors.
        axes: for each tensor, the dimensions of variable size and their names.
    """

    task: Task
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    axes: dict[str, dict[int, str]]

    def __call__(self, model: torch.nn.Module, batch: Batch) -> NamedTensors:
        """Returns the outputs by name."""
        return self.named(self.task.outputs(model, batch))

    @staticmethod
    def named(outputs: Any) -> NamedTensors:
        """Names the model's return values as the outputs of the graph are named."""
        return _named(outputs)

    def feed(self, batch: Batch) -> Batch:
        """Returns those tensors of a batch that the model takes."""
        return {name: batch[name] for name in self.inputs}

    def ports(self, batch: Batch, outputs: NamedTensors) -> tuple[list[Port], list[Port]]:
        """Describes inputs and outputs for `export.json`."""
        return [self._port(name, batch[name]) for name in self.inputs], [
            self._port(name, outputs[name]) for name in self.outputs
        ]

    def _port(self, name: str, tensor: torch.Tensor) -> Port:
        axes = self.axes.get(name, {})
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Port(name, dtype, tuple(axes.get(dim, size) for dim, size in enumerate(tensor.shape)))


def find_forward(model: torch.nn.Module, batch: Batch, *, with_labels: bool) -> Forward:
    """Calls the model on batches of other sizes to find its outputs and variable dimensions.

    Args:
        model: the model, in the mode in which it is exported; its state is restored.
        batch: at least three samples; they may be sequences.
        with_labels: whether labels are passed in, so that the model returns its own loss.

    Raises:
        RequestError: the batch lacks an input that forward needs, or the outputs are not tensors.
    """
    given = batch if with_labels else {name: tensor for name, tensor in batch.items() if name != LABELS}
    task = make_task(model, given)
    inputs = (*map(str, task.by_position), *task.by_name)
    shapes: list[NamedTensors] = []
    varied = [shorter(given, dim) for dim in range(len(_AXES))]
    for one in (given, *varied):
        outputs = _outputs(model, task, one)
        if foreign := foreign_values(outputs):
            path, kind = next(iter(foreign.items()))
            raise RequestError(f"forward returns a {kind} as '{path}': a graph returns tensors")
        shapes.append(_named(outputs))
    axes = {name: _varying(batch[name], [one[name] for one in varied]) for name in inputs}
    axes |= {name: _varying(tensor, [one[name] for one in shapes[1:]]) for name, tensor in shapes[0].items()}
    return Forward(task, inputs, tuple(shapes[0]), axes)


def shorter(batch: Batch, dim: int) -> Batch:
    """Returns the batch with fewer samples (`dim` 0) or, if it holds sequences, with shorter ones (`dim` 1)."""
    if dim == 0:
        return {name: tensor[:-1] for name, tensor in batch.items()}
    if not _has_sequences(batch):
        return batch
    return {name: tensor[:, : tensor.shape[1] // 2] if tensor.dim() > 1 else tensor for name, tensor in batch.items()}


def _has_sequences(batch: Batch) -> bool:
    first = next(iter(batch.values()))
    return first.dim() == 2 and not first.is_floating_point()


def _outputs(model: torch.nn.Module, task: Task, batch: Batch) -> Any:
    with untouched(model), torch.no_grad():
        try:
            return task.outputs(model, batch)
        except RequestError:
            raise
        except Exception as error:
            # The user's own model may raise anything; its error is passed on.
            hint = "" if LABELS in batch else " (without labels it is to return the logits)"
            raise RequestError(f"forward fails in PyTorch{hint}: {type(error).__name__}: {error}") from error


def _named(outputs: Any) -> NamedTensors:
    """Names outputs; an unnamed first output is the loss if it is a scalar, and the logits otherwise."""
    found = {}
    for name, tensor in named_tensors(outputs).items():
        first = LOSS if tensor.dim() == 0 else LOGITS
        found[first if name in ("output", "0") else f"output_{name}" if name[0].isdigit() else name] = tensor
    return found


def _varying(tensor: torch.Tensor, others: list[torch.Tensor]) -> dict[int, str]:
    """Finds the dimensions whose size changes with fewer samples or with shorter sequences, and names them."""
    found = {}
    for dim, size in enumerate(tensor.shape):
        names = [axis for axis, other in zip(_AXES, others, strict=True) if other.shape[dim] != size]
        if names:
            found[dim] = "_".join(names)
    return found


@contextlib.contextmanager
def untouched(model: torch.nn.Module) -> Iterator[None]:
    """Restores the model's buffers after forward passes that change them."""
    state = ModelState(model)
    try:
        yield
    finally:
        state.restore()
