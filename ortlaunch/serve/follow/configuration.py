"""A run's configuration: as text, against the defaults, and against another run's."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import yaml
from omegaconf import OmegaConf

from ortlaunch.base.errors import RequestError
from ortlaunch.base.secrets import hidden
from ortlaunch.base.text import public_text
from ortlaunch.base.yaml_files import fault_of
from ortlaunch.config.default_options import default_options
from ortlaunch.config.paths import conf_dir
from ortlaunch.config.schema import GROUPS, Config, ModelConfig
from ortlaunch.run.journal import flatten
from ortlaunch.run.run import Run
from ortlaunch.run.settings import read_settings
from ortlaunch.serve.api.shapes import Change, Difference
from ortlaunch.serve.follow.beneath import opened_path

_LONGEST_VALUE = 2000
_LARGEST_TEXT = 256 * 1024
_OF_THE_RUN = ("name", "experiment", "run_root", "launcher.run", "tracking.uri", "tracking.artifacts")
"""Keys that each run has to itself, or that the place where it was started has set."""


def settings_of(run: Run) -> dict[str, Any]:
    """Returns a run's configuration without secrets; empty where there is none.

    Raises:
        RequestError: it cannot be read.
    """
    try:
        with opened_path(run.path, run.config_file.name) as path:
            found: dict[str, Any] = hidden("", read_settings(path))
            return found
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RequestError(f"{run.config_file.name} cannot be read: {fault_of(error)}") from error
    except RequestError as error:
        raise RequestError(f"{run.config_file.name} cannot be read: {str(error).partition(': ')[2]}") from error


def text_of(settings: dict[str, Any]) -> str:
    """Returns a configuration as YAML."""
    if not settings:
        return ""
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=1000)[:_LARGEST_TEXT]
    return "\n".join(public_text(line) for line in text.splitlines())


def changes(settings: dict[str, Any]) -> list[Change]:
    """Returns the keys of a configuration that have not their defaults: first the chosen options, then single keys.

    The defaults are those of the chosen options, so that another trainer is one change and not ten.
    """
    values = flatten(settings)
    choices = {group: values.get(f"{group}.name", "") for group in (*GROUPS, "model")}
    defaults = dict(_defaults(tuple(sorted(choices.items()))))
    found: list[Change] = []
    for key, value in values.items():
        group, _, last = key.partition(".")
        if key in _OF_THE_RUN:
            continue
        default = default_options().get(group) if last == "name" and group in choices else defaults.get(key)
        if value != default:
            found.append({"key": _shown(key), "value": _shown(value), "default": _optional(default)})
    return sorted(found, key=lambda change: not change["key"].endswith(".name"))


def differences(settings: dict[str, Any], other: dict[str, Any]) -> list[Difference]:
    """Returns the keys in which two configurations differ."""
    ours, theirs = flatten(settings), flatten(other)
    keys = [*ours, *(key for key in theirs if key not in ours)]
    return [
        {"key": _shown(key), "value": _optional(ours.get(key)), "other": _optional(theirs.get(key))}
        for key in keys
        if ours.get(key) != theirs.get(key) and key not in _OF_THE_RUN
    ]


@lru_cache(maxsize=64)
def _defaults(choices: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """The default of each key, as the configuration is recorded, with these options chosen."""
    nodes: dict[str, Any] = {"model": ModelConfig}
    for group, name in choices:
        node = GROUPS.get(group, {}).get(name)
        if node is not None:
            nodes[group] = node
    shown = {name: OmegaConf.structured(node) for name, node in nodes.items()}
    plain = OmegaConf.to_container(OmegaConf.structured(Config(**shown)), enum_to_str=True)
    assert isinstance(plain, dict)
    values = flatten({str(key): value for key, value in plain.items() if value != "???"})
    return tuple((values | flatten({"model": _model(dict(choices)["model"])})).items())


def _model(name: str) -> dict[str, Any]:
    """What the file of a model under ``conf/`` chooses."""
    path = conf_dir() / "model" / f"{name}.yaml"
    if not name.replace("_", "").isalnum() or not path.is_file():
        return {}
    found = OmegaConf.to_container(OmegaConf.load(path))
    return {str(key): value for key, value in found.items() if key != "defaults"} if isinstance(found, dict) else {}


def _shown(text: str) -> str:
    text = public_text(text)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"


def _optional(text: str | None) -> str | None:
    return None if text is None else _shown(text)
