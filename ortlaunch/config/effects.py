"""What another value of a parameter changes: what a training step does, and which numbers a training computes."""

from __future__ import annotations

import functools

from ortlaunch.config.launchers import launcher_schemas
from ortlaunch.config.schema import key_facts

_SAME_WORK = frozenset(
    [
        *("seed", "name", "experiment", "run_root", "objective"),
        *(
            "train.resume",
            "train.keep_checkpoints",
            "train.save_weights",
            "train.memory_check",
            "trainer.timeout_seconds",
        ),
    ]
)
"""Parameters that do not change what a training step does."""
_SAME_WORK_BELOW = ("tracking.", "trackers.", "profile.")
_SAME_NUMBERS = frozenset(
    [
        *("train.log_every", "train.steady_after", "train.eval_every", "train.gc_every"),
        *("train.best", "train.patience", "eval.step", "eval.metrics"),
        *("train.checkpoint_every", "train.checkpoint_async", "data.workers", "data.path", "data.tokenizer"),
    ]
)
"""Parameters that change the time that steps take, or how often something is done, but no number of a training."""


def same_work(key: str) -> bool:
    """Whether two runs that differ in this parameter may be repeats of each other."""
    return key in _SAME_WORK or key in _of_launchers() or key.startswith(_SAME_WORK_BELOW)


def same_numbers(key: str) -> bool:
    """Whether a training computes the same numbers with another value of this parameter."""
    return key in _SAME_NUMBERS or (same_work(key) and key != "seed")


@functools.cache
def _of_launchers() -> frozenset[str]:
    """Keys of launchers that change nothing that a step does, as their dataclasses say."""
    schemas = launcher_schemas().values()
    return frozenset(f"launcher.{key}" for node in schemas for key, facts in key_facts(node).items() if facts.same_work)
