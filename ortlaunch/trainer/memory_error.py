"""Turns an out-of-memory error into one with figures and advice."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from ortlaunch.base.errors import TrainingError
from ortlaunch.config.schema import Config
from ortlaunch.config.trainers import trainer_of
from ortlaunch.run.run import Run

_GIB = 2**30
_SIGNS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "Failed to allocate memory for requested buffer",
    "bad allocation",
)


def explained(error: BaseException, config: Config, run_dir: Path, rank: int) -> BaseException:
    """The error itself; an out-of-memory error is replaced by one with peak figures and advice.

    On CUDA it also writes a snapshot of the allocator to ``memory/rank-N.pickle``, for pytorch.org/memory_viz.
    """
    if not is_lack_of_memory(error):
        return error
    cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    lines = [f"out of memory: {cause}", f"peak of this worker: {_peak()}", *_advice(config)]
    snapshot = _snapshot(run_dir, rank)
    if snapshot is not None:
        lines.append(f"what held the memory: {snapshot} (drop it on pytorch.org/memory_viz)")
    return TrainingError("\n".join(lines))


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether torch, ONNX Runtime or Python ran out of memory, on the device or on the host."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)
    )


def _peak() -> str:
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    if not torch.cuda.is_initialized():
        return f"{rss:.2f} GiB resident"
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return (
        f"{torch.cuda.max_memory_allocated() / _GIB:.2f} GiB allocated, "
        f"{torch.cuda.max_memory_reserved() / _GIB:.2f} GiB reserved of {total / _GIB:.2f} GiB; {rss:.2f} GiB resident"
    )


def _advice(config: Config) -> list[str]:
    lines = ["what helps, the cheapest first:"]
    train = config.train
    if train.batch_size > 1:
        parts = next(number for number in range(2, train.batch_size + 1) if train.batch_size % number == 0)
        lines.append(
            f"  train.batch_size={train.batch_size // parts} train.grad_accumulation={train.grad_accumulation * parts} "
            f"(the same samples in a step, 1/{parts} of the activations)"
        )
    if not train.activation_checkpointing:
        lines.append("  train.activation_checkpointing=true (recomputes activations in the backward)")
    stage = trainer_of(config.trainer).zero_stage(config.trainer)
    if stage < 3:
        after = "optimizer state", "gradients too", "parameters too"
        lines.append(f"  trainer=deepspeed trainer.zero_stage={stage + 1} (shards {after[stage]} over the workers)")
    return [*lines, "ortlaunch estimate with the same keys says which of these fits, without a run"]


def _snapshot(run_dir: Path, rank: int) -> Path | None:
    if not torch.cuda.is_initialized():
        return None
    path = Run(run_dir).memory_file(rank)
    try:
        path.parent.mkdir(exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
    except (OSError, RuntimeError):
        return None
    return path
