"""The table of trainers. To add one, add a file here with its keys and facts, and an entry in the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ortlaunch.config.trainers.base import Trainer, TrainerConfig
from ortlaunch.config.trainers.ddp import DdpTrainer
from ortlaunch.config.trainers.deepspeed import DeepSpeedTrainer
from ortlaunch.config.trainers.fsdp import FsdpTrainer
from ortlaunch.config.trainers.single import SingleTrainer

_ALL: tuple[Trainer[Any], ...] = (SingleTrainer(), DdpTrainer(), DeepSpeedTrainer(), FsdpTrainer())

TRAINERS: dict[str, Trainer[Any]] = {trainer.name: trainer for trainer in _ALL}
"""Every trainer by its name."""


def trainer_of(cfg: TrainerConfig) -> Trainer[Any]:
    """The facts of the configured trainer."""
    return TRAINERS[cfg.name]


def kind_in_words(kind: str) -> str:
    """The trainers that can load a checkpoint of this kind, as text: ``trainer=single or trainer=ddp``.

    Args:
        kind: the result of `Trainer.checkpoint_kind` when the checkpoint was written.
    """
    same = [one.name for one in _ALL if one.variants is None and one.checkpoint_kind(one.schema()) == kind]
    return " or ".join(f"trainer={name}" for name in same) or kind


def label(name: str | None, params: Mapping[str, str]) -> str | None:
    """The name of a recorded run's trainer in a comparison: ddp, deepspeed z1.

    Args:
        name: the trainer's name as recorded. It may be None, or the name of a trainer that no longer exists.
        params: the run's recorded parameters.
    """
    trainer = TRAINERS.get(name or "")
    if trainer is None or trainer.variants is None:
        return name
    value = params.get(f"trainer.{trainer.variants.key}")
    return name if value is None else f"{name} {trainer.variants.mark}{value}"


def keys_in_names() -> tuple[str, ...]:
    """The keys of trainers whose values appear in a run's default name."""
    return tuple(f"trainer.{trainer.variants.key}" for trainer in _ALL if trainer.variants is not None)
