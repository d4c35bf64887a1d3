"""Changes of workers and trainer that may make a run fit where micro-batch and checkpointing are not enough.

Each keeps the samples of a step. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from ortlaunch.config.schema import Config, Precision
from ortlaunch.config.trainers import TRAINERS

NO_CHANGE = "none of a smaller micro-batch and activation checkpointing is enough"
"""What the tracing process says where neither helps."""
_STAGES = (1, 2, 3)
_OFFLOADED_STAGE = 2
"""Where the optimizer's state is on the host, sharding the gradients too costs nothing more."""


def further_changes(config: Config, workers: int, *, on_gpu: bool) -> dict[str, list[Config]]:
    """What is changed, in words, and the configurations with it; those that save the least come first.

    Args:
        config: the run's configuration.
        workers: its workers on each machine.
        on_gpu: whether each worker has the memory of a GPU for itself.
    """
    found = {
        "fewer workers": [] if on_gpu else [*_fewer(config, workers)],
        "ZeRO": [*_sharded(config, workers)],
        "the optimizer on the host": [*_offloaded(config)] if on_gpu else [],
    }
    # The last one once more with everything else that saves memory.
    return {
        kind: changed if (saving := _saving(changed[-1])) == changed[-1] else [*changed, saving]
        for kind, changed in found.items()
        if changed
    }


def none_is_enough(kinds: Iterable[str]) -> str:
    """What is said where no change of these kinds makes a run fit."""
    names = ["a smaller micro-batch", "activation checkpointing", *kinds]
    return f"none of {', '.join(names[:-1])} and {names[-1]} is enough"


def in_words(config: Config, asked: Config) -> str:
    """The keys of a changed configuration that differ from those that are asked for.

    Args:
        config: the changed one.
        asked: the run's configuration.
    """
    before, now = _keys(asked), _keys(config)
    changed = " ".join(f"{key}={value}" for key, value in now.items() if before.get(key) != value)
    precision, names = asked.train.precision, {asked.trainer.name, config.trainer.name}
    if precision is Precision.fp32 or len(names) == 1 or "deepspeed" not in names:
        return changed
    return f"{changed} ({precision.name} in other tensors than under trainer={asked.trainer.name})"


def _fewer(config: Config, workers: int) -> Iterator[Config]:
    """Fewer workers on each machine, which share its memory: each then has more of the micro-batches."""
    for count in range(workers - 1, 0, -1):
        if workers % count:
            continue
        is_alone = count * config.launcher.nodes == 1
        trainer = TRAINERS["single"].schema() if is_alone and config.trainer.name == "ddp" else config.trainer
        train = replace(config.train, grad_accumulation=config.train.grad_accumulation * (workers // count))
        launcher = replace(config.launcher, workers_per_node=count)
        yield replace(config, trainer=trainer, launcher=launcher, train=train)


def _sharded(config: Config, workers: int) -> Iterator[Config]:
    """Higher stages of ZeRO."""
    schema = _deepspeed(config)
    if schema is not None and workers * config.launcher.nodes > 1:
        before = schema.zero_stage if config.trainer.name == "deepspeed" else 0
        for stage in _STAGES:
            if stage > before:
                yield replace(config, trainer=replace(schema, zero_stage=stage))


def _offloaded(config: Config) -> Iterator[Config]:
    """The optimizer's state in the host's memory."""
    schema = _deepspeed(config)
    if schema is not None and not schema.offload_optimizer:
        stage = max(_OFFLOADED_STAGE, schema.zero_stage if config.trainer.name == "deepspeed" else 0)
        yield replace(config, trainer=replace(schema, zero_stage=stage, offload_optimizer=True))


def _deepspeed(config: Config) -> Any:
    """DeepSpeed's keys; None where its place is taken by another trainer that shards."""
    trainer = config.trainer
    if trainer.name in ("ddp", "single"):
        return TRAINERS["deepspeed"].schema(timeout_seconds=trainer.timeout_seconds)
    return trainer if trainer.name == "deepspeed" else None


def _saving(config: Config) -> Config:
    """The configuration with activation checkpointing and micro-batches of one sample."""
    train = config.train
    accumulation = train.grad_accumulation * train.batch_size
    changed = replace(train, activation_checkpointing=True, batch_size=1, grad_accumulation=accumulation)
    return replace(config, train=changed)


def _keys(config: Config) -> dict[str, str]:
    """The keys that are changed here, and their values as they are typed."""
    trainer: Any = config.trainer
    keys = {
        "trainer": trainer.name,
        "trainer.zero_stage": getattr(trainer, "zero_stage", None),
        "trainer.offload_optimizer": getattr(trainer, "offload_optimizer", False),
        "launcher.workers_per_node": config.launcher.workers_per_node,
        "train.batch_size": config.train.batch_size,
        "train.grad_accumulation": config.train.grad_accumulation,
        "train.activation_checkpointing": config.train.activation_checkpointing,
    }
    return {key: str(value).lower() for key, value in keys.items() if value is not None}
