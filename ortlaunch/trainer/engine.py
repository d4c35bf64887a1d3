"""The interface between the training loop and a wrapped model with its optimizer. Each trainer has a subclass."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ortlaunch.base.errors import RequestError
from ortlaunch.models.modes import evaluation
from ortlaunch.models.task import Batch, Result, Task, weighed, with_gradient
from ortlaunch.trainer.checkpoint.host import HostMemory
from ortlaunch.trainer.checkpoint.torch_state import Write
from ortlaunch.trainer.guard import Guard


def no_weight() -> None:
    """The weight of a micro-batch in a step whose micro-batches all weigh the same."""


class Engine(ABC):
    """Forward, backward and optimizer step of one worker."""

    inner: torch.nn.Module
    """The module that the backend returned: the plain model, or an ORTModule."""
    module: torch.nn.Module
    """What a step calls: `inner`, or what the trainer has put around it."""
    task: Task
    """How it is called, and how its loss is found."""
    sends_buffers: bool = False
    """Whether all workers take the first one's buffers before a step. Otherwise each worker has its own."""
    counts_micro_batches: bool = False
    """Whether the trainer itself counts the micro-batches of a step. Their gradients can then be neither dropped nor
    added to, and there is one model."""
    guard: Guard
    """Keeps losses and gradients that are not finite out of the weights."""
    forward_done: Callable[[], None] = staticmethod(lambda: None)
    """The loop sets this callback. `micro_step` calls it between forward and backward."""
    known_discarded: bool = False
    """Whether the host knows that the last step was discarded because its numbers were not finite.

    The value is the same on all workers. It stays False if the host would have to wait for the device to know, and in
    fp16, where a discarded step is no failure.
    """

    def micro_step(self, batch: Batch, *, last: bool, weight: Callable[[], float | None] = no_weight) -> Result:
        """Runs forward and backward of one micro-batch.

        Args:
            batch: tensors on this worker's device.
            last: whether the optimizer step follows. Workers need to exchange gradients only then.
            weight: called once, between forward and backward: the factor of the loss; None stands for 1.

        Returns:
            The micro-batch's loss, a detached scalar on the device, and its values, all weighed.
        """
        with self.exchange(last=last):
            result = self._forward(batch)
            loss = with_gradient(result.loss)
            self.forward_done()
            factor = weight()
            loss = weighed(loss, factor)
            self.backward(loss, last=last)
        values = {name: value if factor is None else value * factor for name, value in result.values.items()}
        return Result(loss.detach(), values)

    def exchange(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        """The context of a micro-batch's forward and backward. `last` is as in `micro_step`."""
        return contextlib.nullcontext()

    @abstractmethod
    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Computes the gradients of a micro-batch's weighed loss, within `exchange`. `last` is as in `micro_step`."""

    def _forward(self, batch: Batch) -> Result:
        """Runs the forward of a micro-batch in training."""
        with self.precision_context():
            return self.task.run(self.module, self.model_inputs(batch))

    @abstractmethod
    def step(self) -> torch.Tensor | float | None:
        """Clips the gradients, updates the weights, advances the schedule and clears the gradients.

        If gradients are not finite, weights and optimizer state do not change.

        Returns:
            The gradient norm over all workers before clipping; None if it is unknown. A tensor may still be being
            computed on the device.
        """

    def evaluate(self, batch: Batch) -> Result:
        """The loss of a batch, and what metrics are computed from. It must be called within `evaluating`."""
        with self.precision_context():
            return self.task.evaluate(self.evaluated, self.model_inputs(batch))

    @property
    def evaluated(self) -> torch.nn.Module:
        """What an evaluation calls."""
        return self.inner

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Puts the model into evaluation mode without gradients, and each module back into its own mode afterwards."""
        with evaluation(self.inner), torch.no_grad():
            yield

    held: frozenset[torch.nn.Parameter] = frozenset()
    """Weights that no step changes now, nor their optimizer state."""

    def hold(self, weights: frozenset[torch.nn.Parameter], where: str) -> None:
        """Keeps these weights as they are from the next step on, and no others.

        Args:
            weights: the same on all workers.
            where: the key that asks for it, for messages.

        Raises:
            RequestError: the engine updates all weights at once.
        """
        raise RequestError(
            f"{where}: DeepSpeed updates all weights at once: use trainer=ddp or fsdp to freeze some for a time"
        )

    def check_agreement(self) -> None:
        """Refuses weights that workers have moved by others' gradients, before they are logged, evaluated or saved.

        All workers call it.

        Raises:
            RequestError: the workers have used different weights in a step.
        """
        return

    @property
    @abstractmethod
    def lr(self) -> float:
        """The learning rate of the next step."""

    def precision_context(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which the model is called: autocast if the engine uses it."""
        return contextlib.nullcontext()

    def model_inputs(self, batch: Batch) -> Batch:
        """A batch as the engine gives it to the model: with other dtypes if the engine casts its inputs."""
        return batch

    @property
    def loss_scale(self) -> float | None:
        """The factor on the loss in fp16; None in other precisions. It waits for the device."""
        return None

    @abstractmethod
    def snapshot(self, folder: Path, *, shared: bool, memory: HostMemory) -> Write:
        """Copies all state that the next step depends on to host memory. All workers must call it.

        Args:
            folder: the folder that the state will be written to.
            shared: whether nothing changes the state until it is written. What is in host memory is not copied then.
            memory: what the state is copied into.

        Returns:
            A function that writes this worker's part to `folder`. Any thread may call it.
        """

    def warm_up(self, batch: Batch) -> None:
        """Does what an engine does only in its first steps, before `restore`. It leaves no gradients.

        Args:
            batch: any micro-batch on this worker's device.
        """
        return

    @abstractmethod
    def restore(self, folder: Path, saved_workers: int, scratch: Path, group: dist.ProcessGroup) -> None:
        """Loads a written snapshot before the first step. All workers must call it.

        Args:
            folder: the folder of the snapshot.
            saved_workers: the number of workers that wrote it.
            scratch: a folder for temporary files.
            group: a process group of all workers on the CPU.
        """

    @abstractmethod
    def weights(self) -> dict[str, torch.Tensor]:
        """The whole weights and buffers of the model in host memory, by their plain names. All workers must call it.

        They may be the model's own memory, so that a further step would change them.

        Returns:
            The weights on the first worker, with floating-point weights in fp32 as the optimizer keeps them; an empty
            dictionary on all other workers.
        """
