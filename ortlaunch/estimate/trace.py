"""Runs the phases of a run on fake tensors, with the run's own builders and engines, and notes their memory."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from ortlaunch.config.schema import Config
from ortlaunch.data.batch import Batch, count, mapped, named
from ortlaunch.estimate.gpu_operations import as_on_gpu
from ortlaunch.estimate.ledger import Ledger, Use
from ortlaunch.estimate.pretend import (
    as_another_worker,
    few_numbers_known,
    loaded_without_content,
    replacements,
    settle,
)
from ortlaunch.models.checks import check_precision
from ortlaunch.trainer.buffers import plain_buffers
from ortlaunch.trainer.checkpoint.host import HostMemory, to_host
from ortlaunch.trainer.engine import Engine
from ortlaunch.trainer.prepare import build_seeded, task_of
from ortlaunch.trainer.seeds import make_deterministic
from ortlaunch.trainer.workers import Workers
from ortlaunch.trainer.wrapping import wrap

Shapes = Batch
"""A batch without its content: each tensor's shape and dtype, by name."""

CHECKPOINT, BESIDE = "checkpoint", "step beside its copy"
"""The phases in which a checkpoint is made, and in which the next step is taken while its copy is written. The latter
has its own peak where a run makes a single copy: it is chance whether that is still there at the step's peak."""
OTHERS_CHECKPOINT, OTHERS_BESIDE = "checkpoint of the other workers", "their step beside its copy"
"""The same of another worker than the first one, where its part of a checkpoint is another one."""
BY_CHANCE = (BESIDE, OTHERS_BESIDE)
_NOWHERE = Path("/nonexistent")
"""Where the trace would write; it writes nothing."""
_BUCKET = 25 * 2**20


@dataclass(frozen=True)
class Parts:
    """What the memory of a step is for, in bytes of one worker."""

    parameters: int
    """Weights and buffers of the model; of a sharded model this worker's shards."""
    gradients: int
    """All gradients that the optimizer reads."""
    optimizer_state: int
    """The optimizer's state, with copies of the weights that a trainer keeps for it."""
    trainer_buffers: int
    """What else stays from step to step: buckets in which gradients are exchanged, buffers of ZeRO."""
    activations: int
    """What the forward keeps for the backward."""


@dataclass(frozen=True)
class Trace:
    """The memory of one worker's tensors."""

    parts: Parts
    phases: dict[str, Use]
    """The peak of each phase, in the order of a run."""

    def phases_of(self, *, is_first: bool) -> list[str]:
        """The phases of the first worker or of another one.

        Only the first worker collects the weights at the end, and under ZeRO 0 to 2 it alone copies the model for a
        checkpoint.
        """
        if is_first:
            return [name for name in self.phases if name not in (OTHERS_CHECKPOINT, OTHERS_BESIDE)]
        without = {"end", *((CHECKPOINT, BESIDE) if OTHERS_CHECKPOINT in self.phases else ())}
        return [name for name in self.phases if name not in without]


def shapes_of(batch: Batch, batch_size: int) -> Shapes:
    """A batch of tensors without content, with another number of samples."""
    number = count(batch)

    def shape(tensor: torch.Tensor) -> torch.Tensor:
        is_by_sample = tensor.ndim > 0 and len(tensor) == number
        size = (batch_size, *tensor.shape[1:]) if is_by_sample else tensor.shape
        return torch.empty(size, dtype=tensor.dtype, device="meta")

    return mapped(batch, shape)


def trace(config: Config, workers: Workers, shapes: Shapes, *, on_gpu: bool = False) -> Trace:
    """Traces a run as its first worker.

    Args:
        config: the run's configuration.
        workers: this worker's place, as if there were others.
        shapes: of a micro-batch.
        on_gpu: whether the tensors stand for those on a GPU.

    Raises:
        RequestError: the model or the trainer refuses the request, as it would in a run.
        Exception: the model cannot be traced on fake tensors.
    """
    ledger = Ledger(on_gpu=on_gpu)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(replacements(on_gpu=on_gpu))
            if on_gpu:
                stack.enter_context(as_on_gpu())
            stack.enter_context(mode)
            stack.enter_context(few_numbers_known(mode))
            stack.enter_context(loaded_without_content(mode, ledger.adopt))
            stack.enter_context(ledger)
            stack.enter_context(ledger.seeing_resizes())
            batch = mapped(shapes, lambda one: torch.zeros(one.shape, dtype=one.dtype))
            found = Rehearsal(config, workers, batch, ledger, on_gpu=on_gpu).trace()
            del batch
    finally:
        gc.collect()
    return found


class Rehearsal:
    """The phases of a run, in their order."""

    def __init__(self, config: Config, workers: Workers, batch: Batch, ledger: Ledger, *, on_gpu: bool) -> None:
        """
        Args:
            config: the run's configuration, with ``backend=eager``.
            workers: this worker's place.
            batch: the micro-batch of every step.
            ledger: counts the tensors.
            on_gpu: whether the tensors stand for those on a GPU. A run builds its model in the host's memory, and
                copies for its checkpoints into that.
        """
        # More micro-batches need no more memory than three.
        train = replace(config.train, grad_accumulation=min(config.train.grad_accumulation, 3))
        # Stored weights have the shapes of new ones.
        self._config = replace(config, train=train, model=replace(config.model, weights=None))
        self._workers = workers
        self._ledger = ledger
        self._on_gpu = on_gpu
        self._batch = batch
        self._phases: dict[str, Use] = {}

    def trace(self) -> Trace:
        """Runs all phases.

        Raises:
            RequestError: the model or the trainer refuses the request, as it would in a run.
        """
        if self._config.train.deterministic:
            make_deterministic()
        model = build_seeded(self._config)
        check_precision(model)
        self._ended("build")
        if self._on_gpu:
            del self._phases["build"]
        engine = self._start(model)
        self._step(engine)
        parts = self._measured_step(engine)
        self._ended("step")
        self._evaluation(engine)
        if self._on_gpu:
            self._step_beside_old_buckets(engine, parts)
            return Trace(parts, self._phases)
        self._checkpoint(engine)
        self._end(engine)
        return Trace(parts, self._phases)

    def _start(self, model: torch.nn.Module) -> Engine:
        task = task_of(self._config, model, self._batch)
        with self._made_up():
            engine = wrap(model, self._config, self._workers, task, _NOWHERE)
            settle(engine)
        self._ended("start")
        return engine

    def _measured_step(self, engine: Engine) -> Parts:
        """Takes a step in which the optimizer has its state already, and finds its parts."""
        before = self._ledger.now
        kept = self._micro_steps(engine) - before
        parameters = list(engine.inner.parameters())
        gradients = _bytes(_local(one.grad) for one in parameters if one.grad is not None)
        self._optimizer_step(engine)
        of_model = _storages([*map(_local, parameters), *map(_local, engine.inner.buffers())])
        of_optimizer = {key: size for key, size in _storages(_state_of(engine)).items() if key not in of_model}
        model, state = sum(of_model.values()), sum(of_optimizer.values())
        stays = self._ledger.now - _bytes(named(self._batch).values())
        return Parts(
            parameters=model,
            gradients=gradients,
            optimizer_state=state,
            trainer_buffers=max(0, stays - model - state),
            activations=max(0, kept),
        )

    def _step_beside_old_buckets(self, engine: Engine, parts: Parts) -> None:
        """Takes the step in which DDP has new buckets for the gradients beside the old ones.

        After its first steps DDP makes its buckets anew, in the order in which gradients come. NCCL holds the old ones
        until an exchange after its watching thread has come by, which may be a step later: in half of the measured
        runs they were there in a whole step.
        """
        if self._config.trainer.name != "ddp":
            return
        held = [torch.empty(size, dtype=torch.uint8) for size in _pieces(parts.gradients)]
        self._step(engine)
        del held
        step, reserved = self._phases["step"], self._ledger.take_peak().reserved
        self._phases["step"] = replace(step, reserved=max(step.reserved, reserved))

    def _step(self, engine: Engine) -> None:
        self._micro_steps(engine)
        self._optimizer_step(engine)

    def _micro_steps(self, engine: Engine) -> int:
        """Forward and backward of each micro-batch; returns the bytes in use after the first forward."""
        count = self._config.train.grad_accumulation
        after_forward = [self._micro_step(engine, last=index == count - 1) for index in range(count)]
        return after_forward[0]

    def _micro_step(self, engine: Engine, *, last: bool) -> int:
        used = 0
        with contextlib.ExitStack() as stack:

            def forward_done() -> None:
                nonlocal used
                used = self._ledger.now
                # The model's forward may not read made-up values; what the trainer does afterwards may.
                stack.enter_context(self._made_up())

            engine.forward_done = forward_done
            engine.micro_step(self._batch, last=last)
        return used

    def _optimizer_step(self, engine: Engine) -> None:
        with self._made_up():
            engine.step()
        if engine.known_discarded:
            raise RuntimeError("the trainer took the made-up gradients for infinite ones and discarded the step")

    def _evaluation(self, engine: Engine) -> None:
        if self._config.train.eval_every is None:
            return
        self._evaluate(engine)
        self._ended("evaluation")

    def _evaluate(self, engine: Engine) -> None:
        with contextlib.ExitStack() as stack:
            with self._made_up():
                # Some trainers compare a worker's buffers with the first worker's.
                stack.enter_context(engine.evaluating())
            engine.evaluate(self._batch)

    def _checkpoint(self, engine: Engine) -> None:
        if self._config.train.checkpoint_every is None:
            return
        if self._workers.world_size > 1:
            with as_another_worker(engine) as differs:
                if differs:
                    self._snapshot(engine, OTHERS_CHECKPOINT, OTHERS_BESIDE)
        self._snapshot(engine, CHECKPOINT, BESIDE)

    def _snapshot(self, engine: Engine, making: str, beside: str) -> None:
        """The peaks from a checkpoint to the next one, which is a copy only if a step goes on beside its writing.

        Args:
            engine: makes the checkpoint.
            making: the phase in which it is made.
            beside: the phase of the next step.
        """
        train, memory = self._config.train, HostMemory()
        copies = train.copied_checkpoints()
        before = self._ledger.now
        with self._made_up(), memory.copying(keep=copies > 1):
            written = self._copy(engine, shared=copies == 0, memory=memory)
        copied = self._ledger.now - before
        self._ended(making)
        del written, memory
        self._ledger.take_peak()  # The copy is gone only now.
        if copies == 0:
            return
        between = [self._phases["step"]]
        if copies > 1 and train.comes_before_end(train.eval_every):
            # The memory of the copy stays for the next checkpoint, beside all that comes before that.
            between.append(self._phases["evaluation"])
        peak = copied + max(use.tensors for use in between)
        if copies > 1:
            beside, peak = making, max(peak, self._phases[making].tensors)
        self._phases[beside] = Use(peak, peak)

    def _copy(self, engine: Engine, *, shared: bool, memory: HostMemory) -> object:
        """Makes a worker's copy for a checkpoint, of the engine's state and of the buffers beside it; returns it."""
        write = engine.snapshot(_NOWHERE, shared=shared, memory=memory)
        buffers = plain_buffers(engine.inner)
        if buffers and (self._workers.world_size == 1 or engine.sends_buffers):
            in_state = engine.inner.state_dict()
            buffers = {name: value for name, value in buffers.items() if name not in in_state}
        return write, to_host(buffers, shared=shared, memory=memory)

    def _end(self, engine: Engine) -> None:
        if not self._config.train.save_weights:
            return
        with self._made_up():
            # safetensors writes them from where they are.
            weights = engine.weights()
        del weights
        self._ended("end")

    def _made_up(self) -> contextlib.AbstractContextManager[None]:
        return self._ledger.answering()

    def _ended(self, phase: str) -> None:
        self._phases[phase] = self._ledger.take_peak()


def _pieces(size: int) -> list[int]:
    """Bytes in pieces of the size of DDP's buckets."""
    return [_BUCKET] * (size // _BUCKET) + [size % _BUCKET] * (size % _BUCKET > 0)


def _state_of(engine: Engine) -> Iterator[torch.Tensor]:
    """The tensors of the optimizer: its state, and the weights that it updates."""
    optimizer: torch.optim.Optimizer = vars(engine)["_optimizer"]
    for group in optimizer.param_groups:
        yield from map(_local, group["params"])
    for state in optimizer.state.values():
        yield from (_local(value) for value in state.values() if isinstance(value, torch.Tensor))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This worker's part of a tensor."""
    sharded = getattr(tensor, "ds_tensor", None)  # Of a parameter under ZeRO 3.
    if sharded is not None:
        tensor = sharded
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """The bytes of each storage, by its key."""
    return {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(_storages(tensors).values())
