"""Run under torchrun: what engines exchange between workers, and what a loss that is not finite does to their weights.

Writes {case: {"collectives": [per micro-batch], "kept": .., ...}} of each rank for the test to read.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.distributed_c10d import _world
from torch.distributed.tensor import DTensor

from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.config.schema import Config, Device
from ortlaunch.config.trainers import trainer_of
from ortlaunch.models.registry import build_model
from ortlaunch.models.task import Batch, make_task
from ortlaunch.trainer import shared_memory
from ortlaunch.trainer.engine import Engine
from ortlaunch.trainer.seeds import seed_everything
from ortlaunch.trainer.shared_memory import SharedMemory
from ortlaunch.trainer.state_memory import weights_of
from ortlaunch.trainer.workers import Workers, join
from ortlaunch.trainer.wrapping import wrap
from tests.support.torchrun import leave

BAD_RANK = 1
sums: list[int] = []
"""The elements of each sum that went through shared memory."""


class Noted(SharedMemory):
    """Notes each sum."""

    def sum_(self, tensor: torch.Tensor, *, scale: float = 1.0) -> None:
        sums.append(tensor.numel())
        super().sum_(tensor, scale=scale)


def main() -> None:
    """Arguments: the file to write, then cases as NAME:OVERRIDE,OVERRIDE."""
    workers: Workers | None = None
    shared_memory.SharedMemory = Noted  # type: ignore[misc]
    results: dict[str, dict[str, Any]] = {}
    for case in sys.argv[2:]:
        name, _, overrides = case.partition(":")
        config = to_config(compose(["device=cpu", "model=mlp", "tracking=none", *overrides.split(",")]))
        workers = workers or join(config, Device.cpu)
        results[name] = probe(config, workers)
    assert workers is not None
    torch.save(results, f"{sys.argv[1]}.{workers.rank}")
    leave()


def probe(config: Config, workers: Workers) -> dict[str, Any]:
    seed_everything(0)
    sums.clear()
    model = build_model(config.model)
    least, largest = least_held(model, config, workers), max(p.nbytes for p in model.parameters())
    engine = wrap(model, config, workers, make_task(model, batch(workers, 0)), Path(sys.argv[1]).parent)
    # DDP agrees on its buckets at the beginning of the second step, once.
    for number in range(3):
        counts = step(engine, config, workers, number)
    moved, before = weights(engine), weights(engine)
    engine.guard.step = 5
    step(engine, config, workers, 5, bad=workers.rank == BAD_RANK)
    known_discarded = engine.known_discarded
    after_bad = weights(engine)
    # What follows is good again, but must not be trusted: the host may learn of the bad step only later.
    engine.guard.step = 6
    step(engine, config, workers, 6)
    return {
        "collectives": counts,
        "bytes": (least, engine.most_held, largest),  # type: ignore[attr-defined]
        "moved": moved,
        "through memory": sum(sums),
        "finite": all(bool(weight.isfinite().all()) for weight in moved),
        "kept": all(torch.equal(*pair) for pair in zip(before, after_bad, strict=True)),
        "kept afterwards": all(torch.equal(*pair) for pair in zip(before, weights(engine), strict=True)),
        "known_discarded": known_discarded,
        "read": engine.guard.read(),
    }


def step(engine: Engine, config: Config, workers: Workers, number: int, bad: bool = False) -> list[int]:
    """A step; returns the collectives within each micro-batch."""
    counts = []
    count = config.train.grad_accumulation
    for index in range(count):
        given = batch(workers, number * 10 + index)
        if bad and index == 0:
            given["pixel_values"][0, 0, 0, 0] = float("nan")
        before = collectives()
        engine.micro_step(given, last=index == count - 1)
        counts.append(collectives() - before)
    engine.most_held = held(engine)  # type: ignore[attr-defined]
    engine.step()
    return counts


def least_held(model: torch.nn.Module, config: Config, workers: Workers) -> int:
    """What the start of a run says that a worker holds."""
    weights = weights_of(model, config.optimizer, config.train.precision)
    return trainer_of(config.trainer).state_bytes(config.trainer, weights, workers.world_size)


def held(engine: Engine) -> int:
    """Bytes of the weights, gradients and optimizer state of this worker, before a step: each storage once."""
    optimizer, inner = engine._optimizer, list(engine.inner.parameters())  # type: ignore[attr-defined]
    # What DeepSpeed keeps of gradients and weights is not where torch has it.
    zero = getattr(getattr(engine, "_engine", None), "optimizer", None)
    found = [
        *(getattr(parameter, "ds_tensor", parameter) for parameter in [*inner, *optimizer.state]),
        *(parameter.grad for parameter in [*inner, *optimizer.state]),
        *(one for state in optimizer.state.values() for one in state.values()),
        *_leaves(getattr(zero, "averaged_gradients", {})),
        *engine.inner.buffers(),
    ]
    local = [one.to_local() if isinstance(one, DTensor) else one for one in found if isinstance(one, torch.Tensor)]
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in local}
    return sum(storages.values())


def _leaves(value: Any) -> list[Any]:
    if not isinstance(value, dict | list):
        return [value]
    return [leaf for one in (value.values() if isinstance(value, dict) else value) for leaf in _leaves(one)]


def collectives() -> int:
    """How many collectives this worker has begun, by the number that each group gives to its own.

    torch has no public name for it. The profiler's events are no measure: on torch 2.6 those of Gloo's threads may come
    after it has stopped. Sums through shared memory have no group, and are counted beside.
    """
    return sum(group._get_sequence_number_for_group() for group in _world.pg_map) + len(sums)


def batch(workers: Workers, number: int) -> Batch:
    generator = torch.Generator().manual_seed(100 * number + workers.rank)
    images = torch.randn(4, 1, 8, 8, generator=generator)
    return {"pixel_values": images, "labels": torch.randint(0, 10, (4,), generator=generator)}


def weights(engine: Engine) -> list[torch.Tensor]:
    # Sharded ones as a whole: a step that one worker alone took must be seen.
    parameters = [p.full_tensor() if isinstance(p, DTensor) else p for p in engine.inner.parameters()]
    whole: Any = contextlib.nullcontext()
    if any(hasattr(parameter, "ds_id") for parameter in parameters):
        import deepspeed

        whole = deepspeed.zero.GatheredParameters(parameters)
    with whole:
        return [parameter.detach().clone() for parameter in parameters]


main()
