"""The secrets among the keys of runs. Files that only the service's account can read keep them, not the database.

Each file holds, by the hidden key and by the hidden word of the command line, what stands there really. It is what
`ortlaunch.base.secrets.CARRIER` takes, so that neither ``ps`` nor a backup of the database shows it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ortlaunch.base.files import PRIVATE, replace
from ortlaunch.base.reading import read_json
from ortlaunch.base.secrets import hidden, without_secrets_in_words
from ortlaunch.serve.secret import digest


def secrets_among(keys: Mapping[str, Any], words: list[str] | None = None) -> dict[str, str]:
    """Returns the secrets of a request by key, and by hidden word.

    Args:
        keys: the keys as they were sent. A list is a text with a line for each entry.
        words: the words of the command line.
    """
    found = {key: value for key, value in keys.items() if isinstance(value, str) and hidden(key, value) != value}
    entries = {f"{key}.{at}": one for key, value in found.items() for at, one in enumerate(value.split("\n"))}
    shown = without_secrets_in_words(words or [])
    return {**found, **entries, **{one: word for one, word in zip(shown, words or [], strict=True) if one != word}}


def keep(folder: Path, run_dir: str, secrets: Mapping[str, str]) -> None:
    """Keeps the secrets of a run until it is deleted, beside those that it has already.

    Args:
        folder: where they are kept.
        run_dir: the run folder. The run's key would not do: anybody can make a folder with that of another's run.
        secrets: from `secrets_among`.
    """
    if secrets:
        folder.mkdir(mode=0o700, exist_ok=True)
        replace(_file(folder, run_dir), json.dumps({**kept(folder, run_dir), **secrets}).encode(), PRIVATE)


def kept(folder: Path, run_dir: str) -> dict[str, str]:
    """Returns the secrets of the run in a folder; none if it has none."""
    return read_json(_file(folder, run_dir)) or {}


def forget(folder: Path, run_dir: str) -> None:
    """Deletes the secrets of the run that was in a folder."""
    _file(folder, run_dir).unlink(missing_ok=True)


def _file(folder: Path, run_dir: str) -> Path:
    return folder / f"{digest(run_dir)}.json"
