"""The command line's keys: which configuration is asked for, and which axes they hold to some values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.overrides import parsed
from ortlaunch.config.trainers import TRAINERS
from ortlaunch.config.trainers.base import TrainerConfig

BACKEND, TRAINER, WORKERS = "backend", "trainer", "workers"
THREADS, ALLOCATOR = "threads", "allocator"
PRECISION, OPTIMIZER = "precision", "optimizer"

KEYS = {
    "backend": BACKEND,
    "trainer": TRAINER,
    "trainer.zero_stage": "zero_stage",
    "launcher.workers_per_node": WORKERS,
    "launcher.threads": THREADS,
    "launcher.allocator": ALLOCATOR,
    "train.activation_checkpointing": "checkpointing",
    "train.precision": PRECISION,
    "optimizer": OPTIMIZER,
}
"""Keys whose values restrict an axis, and the name of the restriction."""
LEARNING = {PRECISION: "train.precision", OPTIMIZER: "optimizer"}
"""Axes that are held unless they are freed, and their keys."""
OF_EVERY_TRAINER = [one.name for one in fields(TrainerConfig) if one.name != "name"]
"""The keys that all trainers have, which say nothing about which one is meant."""
_BATCH = ("train.batch_size", "train.grad_accumulation")
_MOST_VALUES = 64
_MOST_OTHERS = 32
_ANYWHERE = f"{BACKEND}=eager"
"""The backend that goes with every trainer, precision and device."""


@dataclass(frozen=True)
class Words:
    """The command line's keys, taken apart."""

    composed: list[str]
    """The words with one value each, of which the configuration as asked is composed."""
    kept: list[str]
    """The words that say nothing about an axis: what the winner's command begins with."""
    given: dict[str, list[str]]
    """The values that an axis is held to, as texts."""

    def others(self) -> Iterator[list[str]]:
        """The words with other values of each list than the first ones; at most `_MOST_OTHERS` times.

        The number of workers changes last, because the global batch follows from it. A backend that is not given is the
        default one, and what is given may not go with it.
        """
        axes = sorted((axis for axis in KEYS.values() if axis in self.given), key=lambda axis: axis != WORKERS)
        more = [[]] if BACKEND in self.given else [[], [_ANYWHERE]]
        combinations = itertools.product(*(self.given[axis] for axis in axes), more)
        for *values, added in itertools.islice(combinations, 1, 1 + _MOST_OTHERS):
            chosen = dict(zip(axes, values, strict=True))
            keys = [(word, word.partition("=")[0]) for word in self.composed]
            yield [*(f"{key}={chosen[KEYS[key]]}" if KEYS.get(key) in chosen else word for word, key in keys), *added]


def taken_apart(words: Sequence[str], free: Sequence[str]) -> Words:
    """Takes the words of a command line apart.

    Args:
        words: the command line without the verb's own options.
        free: the axes of the learning that are freed.

    Raises:
        RequestError: a list of values is given for a key that has no axis, or whose axis is not freed.
    """
    from hydra.core.override_parser.types import Glob

    composed, kept = [], []
    given: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("-") or "=" not in word:
            composed.append(word)
            kept.append(word)
            continue
        override = parsed(word)
        key = override.key_or_group
        values = [word.partition("=")[2]]
        if override.is_sweep_override():
            if not override.is_discrete_sweep() or isinstance(override.value(), Glob):
                raise RequestError(f"{word}: give the values one by one, with commas between them")
            values = [str(one) for one in itertools.islice(override.sweep_string_iterator(), _MOST_VALUES + 1)]
            _check_list(word, key, values, free)
        axis = KEYS.get(key)
        composed.append(f"{word.partition('=')[0]}={values[0]}" if len(values) > 1 else word)
        if axis is None and key not in _BATCH:
            kept.append(word)
        if axis is not None:
            given[axis] = [value.strip("'\" ") for value in values]
        elif key.partition(".")[0] in (BACKEND, TRAINER) and key.partition(".")[2] not in OF_EVERY_TRAINER:
            # The key belongs to an option of the group, so that others are not meant.
            given.setdefault(f"{key.partition('.')[0]}.key", []).append(key)
    if "zero_stage" in given and "deepspeed" in given.get(TRAINER, []):
        # Of the trainers that are to be tried, the one that has the key must be composed.
        composed = ["trainer=deepspeed" if word.startswith("trainer=") else word for word in composed]
    return Words(composed, kept, given)


def _check_list(word: str, key: str, values: list[str], free: Sequence[str]) -> None:
    if len(values) > _MOST_VALUES:
        raise RequestError(f"{word[:60]}: more than {_MOST_VALUES} values")
    axis = KEYS.get(key)
    if axis in LEARNING and axis not in free:
        raise RequestError(f"{word}: another {axis} changes the training: add --free={axis}, or give one value")
    if key in _BATCH:
        raise RequestError(
            f"{word}: the global batch follows from this key, and micro-batch and accumulation are searched: give one "
            "value (--free=batch searches the global batch too)"
        )
    if axis is None:
        raise RequestError(
            f"{word}: tune searches values of {', '.join(KEYS)}: give one value here (ortlaunch bench runs any grid)"
        )


def trainers_named(names: Sequence[str]) -> list[str]:
    """Checks the names of trainers and returns them.

    Raises:
        RequestError: there is no such trainer.
    """
    for name in names:
        if name not in TRAINERS:
            raise RequestError(f"trainer={name}: there is no such trainer (there are {', '.join(TRAINERS)})")
    return list(names)
