"""How long a run is, in steps: the workers count the steps of epochs and tokens when they have opened the data."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import Config, TrainConfig
from ortlaunch.data.batch import Batch, tokens
from ortlaunch.data.loader import Loader
from ortlaunch.trainer.workers import Workers

EPOCH = "epoch"


def in_steps(config: Config, loader: Loader, first: Batch, workers: Workers) -> Config:
    """The configuration with its duration, and the steps between logs, evaluations and checkpoints, as numbers.

    Args:
        config: the run's configuration.
        loader: this worker's data.
        first: its first batch.
        workers: this worker's place.

    Raises:
        RequestError: epochs of data whose length is not known, or tokens of data without any.
    """
    train = config.train
    if not train.counts_steps:
        train = replace(train, steps=_steps(train, loader, first, workers), epochs=None, tokens=None)
    every = {key: getattr(train, key) for key in ("log_every", "eval_every", "checkpoint_every")}
    counted: dict[str, Any] = {
        key: math.ceil(_of_epoch(train, loader, f"train.{key}")) for key in every if every[key] == EPOCH
    }
    return replace(config, train=replace(train, **counted))


def _steps(train: TrainConfig, loader: Loader, first: Batch, workers: Workers) -> int:
    if train.epochs is not None:
        return max(1, math.ceil(train.epochs * _of_epoch(train, loader, "train.epochs")))
    number = tokens(first)
    if not number:
        raise RequestError(
            f"train.tokens={train.tokens}: {loader.origin} has no tokens: give train.epochs or train.steps"
        )
    assert train.tokens is not None
    return math.ceil(train.tokens / (number * train.grad_accumulation * workers.world_size))


def _of_epoch(train: TrainConfig, loader: Loader, key: str) -> float:
    """The steps of an epoch, of which the last may be a part."""
    if loader.batches_per_epoch is None:
        raise RequestError(f"{key}: {loader.origin} is a stream, whose length is not known: give numbers of steps")
    return loader.batches_per_epoch / train.grad_accumulation
