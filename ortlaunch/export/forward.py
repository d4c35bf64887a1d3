"""The forward of a model as a graph has it: named tensors in, named tensors out."""

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
    """How a model is called, and what comes out.

    Attributes:
        inputs: names of the batch's tensors that go in, in the order of the graph's inputs.
        outputs: names of the tensors that come out.
        axes: by name, the dimensions whose size may vary, and what they are called.
    """

    task: Task
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    axes: dict[str, dict[int, str]]

    def __call__(self, model: torch.nn.Module, batch: Batch) -> NamedTensors:
        """The outputs by name."""
        return self.named(self.task.outputs(model, batch))

    @staticmethod
    def named(outputs: Any) -> NamedTensors:
        """What a model returned, by the names of the graph's outputs."""
        return _named(outputs)

    def feed(self, batch: Batch) -> Batch:
        """What goes in of a batch."""
        return {name: batch[name] for name in self.inputs}

    def ports(self, batch: Batch, outputs: NamedTensors) -> tuple[list[Port], list[Port]]:
        """Inputs and outputs as `export.json` describes them."""
        return [self._port(name, batch[name]) for name in self.inputs], [
            self._port(name, outputs[name]) for name in self.outputs
        ]

    def _port(self, name: str, tensor: torch.Tensor) -> Port:
        axes = self.axes.get(name, {})
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Port(name, dtype, tuple(axes.get(dim, size) for dim, size in enumerate(tensor.shape)))


def find_forward(model: torch.nn.Module, batch: Batch, *, with_labels: bool) -> Forward:
    """Calls the model on batches of other sizes and sees what comes out.

    Args:
        model: in the mode in which it is exported; left as it was.
        batch: at least three samples, which may be sequences.
        with_labels: whether labels go in, so that the model's own loss comes out.

    Raises:
        RequestError: the batch gives fewer inputs than forward needs, or the outputs are no tensors.
    """
    given = batch if with_labels else {name: tensor for name, tensor in batch.items() if name != LABELS}
    task = make_task(model, given)
    inputs = (*task.by_position, *task.by_name)
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
    """The same batch with fewer samples (`dim` 0) or shorter sequences (`dim` 1, where there are sequences)."""
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
            # The user's own model: whatever it raises is what there is to say.
            raise RequestError(f"forward fails in PyTorch: {type(error).__name__}: {error}") from error


def _named(outputs: Any) -> NamedTensors:
    """A lone tensor, or the first of several without names, is the loss where it is a number and else the logits."""
    found = {}
    for name, tensor in named_tensors(outputs).items():
        first = LOSS if tensor.dim() == 0 else LOGITS
        found[first if name in ("output", "0") else f"output_{name}" if name[0].isdigit() else name] = tensor
    return found


def _varying(tensor: torch.Tensor, others: list[torch.Tensor]) -> dict[int, str]:
    """Which dimensions have another size in the batch with fewer samples, and in that with shorter sequences."""
    found = {}
    for dim, size in enumerate(tensor.shape):
        names = [axis for axis, other in zip(_AXES, others, strict=True) if other.shape[dim] != size]
        if names:
            found[dim] = "_".join(names)
    return found


@contextlib.contextmanager
def untouched(model: torch.nn.Module) -> Iterator[None]:
    """Within it, forward passes may move buffers; afterwards they are as they were."""
    state = ModelState(model)
    try:
        yield
    finally:
        state.restore()
