"""The winner as a ready job, and as a command; both are composed again and compared before anybody is told of them."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from ortlaunch.base.errors import RequestError
from ortlaunch.base.files import replace_text
from ortlaunch.base.secrets import hidden, without_secrets_in_words
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.compose.prepare import prepared
from ortlaunch.config.load import to_config, to_dict
from ortlaunch.config.schema import Config

_GROUPS = ("data", "model", "backend", "trainer", "optimizer", "scheduler")
"""In this order: a model may choose its data."""
_NOT_OF_JOB = ("tracking", "trackers", "run_root", "profile")
"""Where a run is kept and recorded is no part of the job."""
_VARIABLE = "ORTLAUNCH_JOBS"


def write_job(config: Config, folder: Path, headline: str) -> tuple[Path | None, str]:
    """Writes a configuration as a ready job.

    Args:
        config: the configuration.
        folder: where the file comes; it is made.
        headline: its first line, which says what it is.

    Returns:
        The file, and the command that runs it; or None and why there is none.
    """
    name = f"tuned_{re.sub(r'[^A-Za-z0-9_]+', '_', config.model.name)}"
    choices = [f"{group}={getattr(config, group).name}" for group in _GROUPS]
    try:
        plain = _settings(prepared(to_config(compose(choices))))
    except RequestError as error:
        return None, f"no ready job: {error}"
    wanted = _settings(config)
    changes = _changes(plain, wanted)
    defaults: list[Any] = [f"override /{group}: {getattr(config, group).name}" for group in _GROUPS]
    lines = ["defaults:", *(f"  - {one}" for one in defaults), "  - _self_"]
    body = yaml.safe_dump(hidden("", changes), sort_keys=False, allow_unicode=True) if changes else ""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.yaml"
    replace_text(path, f"# {headline}\n" + "\n".join(lines) + "\n" + body)
    with _jobs_from(folder):
        try:
            composed = _settings(prepared(to_config(compose([f"+jobs={name}"]))))
        except RequestError as error:
            composed = {"error": str(error)}
    if composed != wanted:
        path.unlink()
        return None, "no ready job: the configuration takes more than keys (files of your own, or secrets)"
    return path, f"{_VARIABLE}={shlex.quote(str(folder))} ortlaunch +jobs={name}"


def command_of(words: list[str], overrides: list[str], config: Config) -> str | None:
    """The command that runs a configuration; None if these words compose another one, such as with keys of a ready job.

    Args:
        words: the words of the command line that say nothing about an axis.
        overrides: the keys of the axes.
        config: what it must compose to.
    """
    chosen = {word.partition("=")[0] for word in overrides}
    kept = [word for word in words if word.lstrip("+").partition("=")[0] not in chosen]
    if not any(word.startswith("-") for word in kept):
        try:
            composed = _settings(prepared(to_config(compose([*kept, *overrides]))))
        except RequestError:
            return None
        if composed != _settings(config):
            return None
    return shlex.join(["ortlaunch", *without_secrets_in_words(kept), *overrides])


def _settings(config: Config) -> dict[str, Any]:
    return {key: value for key, value in to_dict(config).items() if key not in _NOT_OF_JOB}


def _changes(plain: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `wanted` with other values than in `plain`, nested as there."""
    found: dict[str, Any] = {}
    for key, value in wanted.items():
        before = plain.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            if inner := _changes(before, value):
                found[key] = inner
        elif value != before or key not in plain:
            found[key] = value
    return found


@contextmanager
def _jobs_from(folder: Path) -> Iterator[None]:
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before
