"""Checks the words KEY=VALUE of a command line one by one, before Hydra composes them.

Hydra takes ``+KEY``, ``++KEY`` and ``~KEY`` for new or removed keys, which its own check of keys does not see. An
error of its parser does not always name the word, and may be a traceback.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ortlaunch.base.errors import RequestError
from ortlaunch.config.keys import is_free, known_keys
from ortlaunch.config.load import first_line
from ortlaunch.config.paths import conf_dir, group_options
from ortlaunch.config.schema import GROUPS, OPTIONAL_GROUPS

if TYPE_CHECKING:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override

MOST_RUNS = 10_000
"""The most runs of a sweep."""
JOBS = "jobs"
"""The group of the ready jobs, which exists only on the command line."""
_ALWAYS_CHOSEN = {"model", *GROUPS} - OPTIONAL_GROUPS
"""The groups of which every configuration has an option. GROUP=OPTION chooses another, and +GROUP adds nothing."""
_HYDRA_KEYS = re.compile(r"hydra(\.(searchpath|verbose|sweep\.dir|sweeper\b.*)|/sweeper)")
"""Hydra's own keys that have a use here. Others would make folders of Hydra's or change the working folder."""


def quoted(text: str) -> str:
    """Returns a text as Hydra's grammar takes it, whatever signs are in it."""
    # A backslash counts only before a quote or at the end.
    escaped = re.sub(r"(\\*)'", lambda found: found[1] * 2 + "\\'", text)
    ends = len(escaped) - len(escaped.rstrip("\\"))
    return f"'{escaped}{chr(92) * ends}'"


def parsed(word: str) -> Override:
    """The override that a word is.

    Raises:
        RequestError: Hydra cannot read the word.
    """
    from hydra.errors import HydraException

    if word.partition("=")[0].strip("+~ ") == "":
        raise RequestError(f"{word}: keys are given as KEY=VALUE (ortlaunch --help)")
    try:
        override: Override = _parser().parse_overrides([word])[0]
        override.value()
    except HydraException as error:
        # Imported here and below for errors alone.
        from ortlaunch.compose.hydra_errors import explain

        raise RequestError(explain(error)) from error
    except (ValueError, RecursionError, TypeError, OverflowError) as error:
        # Numbers of more than 4300 digits, and brackets in brackets without end.
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else first_line(error)
        raise RequestError(f"{word}: cannot be read: {reason}") from error
    return override


@functools.cache
def _parser() -> OverridesParser:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create()


def check_overrides(words: list[str], config_dirs: list[str]) -> None:
    """Checks each word of a command line that is an override.

    Args:
        words: the overrides.
        config_dirs: the folders of the user's own configuration, whose groups may be added.

    Raises:
        RequestError: a word cannot be read, takes a key away, adds a key that the configuration does not have, or
            brings the runs of a sweep to none or to more than a sweep can have.
    """
    runs = 1.0
    for word in words:
        override = parsed(word)
        if override.is_sweep_override():
            runs *= _count(override)
            if not runs > 0:
                raise RequestError(f"{word}: it gives no value: write range(START,STOP,STEP) with START before STOP")
            if runs > MOST_RUNS:
                raise RequestError(f"{word}: a sweep has at most {MOST_RUNS:,} runs: give fewer values")
        key = override.key_or_group
        if key.partition(".")[0].partition("/")[0] == "hydra":
            _check_hydra_key(word, key, is_change=not (override.is_delete() or override.is_add()))
        elif override.is_delete():
            _check_removed(word, key)
        elif override.is_add() or override.is_force_add():
            _check_added(word, override, config_dirs)


def _count(override: Override) -> float:
    """How many values a word gives a key, without making them: Hydra's ranges may have any number."""
    from hydra.core.override_parser.types import ChoiceSweep, RangeSweep

    value = override.value()
    if isinstance(value, RangeSweep):
        start, stop, step = (float(one or 0) for one in (value.start, value.stop, value.step))
        return (stop - start) / step if step else 0.0
    # A pattern chooses among the options of a group, which are few.
    return len(value.list) if isinstance(value, ChoiceSweep) else 1


def no_runs(words: list[str], config_dirs: list[str]) -> RequestError:
    """Returns the error for a sweep whose patterns choose nothing, with the first of them that does not.

    Args:
        words: the overrides of the command line.
        config_dirs: the folders of the user's own configuration.
    """
    from hydra.core.override_parser.types import Glob

    for override in map(parsed, words):
        pattern, group = override.value(), override.key_or_group
        if isinstance(pattern, Glob):
            options = _options_of(group, config_dirs)
            if not options:
                text = f"a pattern chooses among the options of a group, and {group} is none: give its values"
                return RequestError(f"{override.input_line}: {text}")
            if not pattern.filter(options):
                there = ", ".join(options)
                return RequestError(f"{override.input_line}: no option of the group matches (there are {there})")
    return RequestError("the sweep has no runs: a pattern of a ready job matches no option of its group")


def _options_of(group: str, config_dirs: list[str]) -> list[str]:
    """The names of a group's options; none where the key is no group."""
    # Imported here, because the registry is needed for errors alone.
    from ortlaunch.models.registry import available

    ours = available() if group == "model" else GROUPS.get(group, ())
    own = [path.stem for folder in map(Path, config_dirs) for path in (folder / group).glob("*.yaml")]
    return sorted({*ours, *group_options(group), *own})


def _check_hydra_key(word: str, key: str, *, is_change: bool) -> None:
    if not is_change or not _HYDRA_KEYS.fullmatch(key):
        raise RequestError(
            f"{word}: ortlaunch keeps its own run folders and logs, so this key of Hydra cannot be set; run_root, "
            "experiment and name say where a run is"
        )


def _check_removed(word: str, key: str) -> None:
    if not is_free(key):
        raise RequestError(
            f"{word}: a key cannot be removed: give it another value, or null (all keys: ortlaunch --cfg job)"
        )


def _check_added(word: str, override: Override, config_dirs: list[str]) -> None:
    """Refuses ``+KEY`` for a key that is neither known nor in a node that takes any key."""
    key = override.key_or_group
    if key == "after":
        raise RequestError(f"{word}: +after=RUN goes with ortlaunch run, and names the runs to wait for")
    if key in _ALWAYS_CHOSEN:
        raise RequestError(f"{word}: the group is there already: write {word.lstrip('+')}")
    is_group = key in (JOBS, *OPTIONAL_GROUPS) or _is_own_group(key, config_dirs)
    if is_group and override.value() in ([], "", None):
        raise RequestError(f"{word}: it chooses no option of the group: leave it out")
    if not (is_group or is_free(key) or "/" in key or key in known_keys()):
        from ortlaunch.config.meant import unknown_key

        raise RequestError(unknown_key(key))


def _is_own_group(key: str, config_dirs: list[str]) -> bool:
    """Whether a user's folder of configuration has files for a group of this name."""
    folders = [*map(Path, config_dirs), conf_dir()]
    return any((folder / key).is_dir() for folder in folders)
