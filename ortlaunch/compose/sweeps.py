"""The keys that the command line of a sweep varies, and the names of its runs."""

from __future__ import annotations

import functools

from ortlaunch.base.secrets import without_secrets_in_words
from ortlaunch.compose.overrides import parsed


def swept_name(overrides: list[str], name: str | None) -> str:
    """Returns a name for a sweep from the keys that it varies, such as ``sweep-backend-optimizer.lr``."""
    return f"sweep-{name}" if name is not None else "-".join(["sweep", *swept_keys(overrides)])


def swept_keys(overrides: list[str]) -> list[str]:
    """Returns the keys with several values on the command line; a list in brackets or quotes is one value.

    Raises:
        RequestError: Hydra does not understand the command line.
    """
    return list(_swept_keys(tuple(word for word in overrides if "=" in word and not word.startswith("-"))))


@functools.lru_cache(maxsize=1)
def _swept_keys(words: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the same keys from a cache, because every run of a sweep asks for them."""
    overrides = [parsed(word) for word in words]
    return tuple(one.key_or_group for one in overrides if one.is_sweep_override())


def swept_words(varied: list[str], overrides: list[str]) -> list[str]:
    """Returns the overrides that distinguish a run in its sweep, without secrets; all where a ready job sweeps.

    Args:
        varied: the command line of the sweep.
        overrides: the overrides that make this run.
    """
    keys = swept_keys(varied)
    words = without_secrets_in_words(overrides)
    return [word for word in words if word.lstrip("+~").partition("=")[0] in keys] or words


def run_name(name: str, keys: list[str], overrides: list[str]) -> str:
    """Returns a run's name with the values that distinguish it in its sweep: ``gpt2-ort-ddp-lr=0.001``.

    Args:
        name: the name without these values.
        keys: the keys that the sweep varies and the name does not show.
        overrides: the overrides that make this run.
    """
    shown = without_secrets_in_words(overrides)
    values = dict(override.lstrip("+~").split("=", 1) for override in shown if "=" in override)
    return "-".join([name, *(f"{key.rpartition('.')[2]}={values[key]}" for key in keys if key in values)])
