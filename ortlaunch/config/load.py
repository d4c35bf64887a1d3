"""Converts between Hydra's composed tree, the run folder's ``config.yaml`` and the dataclasses of the schema."""

from __future__ import annotations

import copy
import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from ortlaunch.base.errors import RequestError
from ortlaunch.base.files import replace_text
from ortlaunch.base.secrets import hidden
from ortlaunch.config.hidden import restored
from ortlaunch.config.items import check_items
from ortlaunch.config.launchers import launcher_schema
from ortlaunch.config.schema import GROUPS, Config, ModelConfig, RunConfig, ScriptRun
from ortlaunch.run.settings import read_settings

_CHECKED = [group for group in GROUPS if group != "tracking"]
"""The groups whose options are known here; those of trackers are in `ortlaunch.tracking.trackers`."""
_OF_TYPES = (
    (r"could not be converted to Integer$", "must be a whole number"),
    (r"could not be converted to Float$", "must be a number"),
    (r"is not a valid bool", "must be true or false"),
    (r"^Invalid value '.*', expected one of \[(.*)\]$", r"must be one of \1"),
    (r"^Cannot convert '.*' to string", "must be text"),
    (r"^(field '.*' is not Optional|Incompatible value 'None' for field of type)", "must not be null"),
    (r"^Cannot assign .* to Dict", "must be keys and values, {NAME: VALUE}"),
    (r"is not a ListConfig, list or tuple", "must be a list, [A,B]"),
    (r"^Cannot merge DictConfig with ListConfig", "a list is written as [A,B], keys and values as {NAME: VALUE}"),
    (r"^Invalid type assigned: .* is not a subclass of", "has keys of its own: give these (ortlaunch --cfg job)"),
)
"""What OmegaConf says of a value of another type, and the same in plain words."""
_BASES = tuple(hint for name, hint in get_type_hints(Config).items() if name in GROUPS)
"""The types of groups, of which each option has its own."""


def to_config(tree: DictConfig) -> Config:
    """Converts a composed tree into the schema's dataclasses; raises the errors of `to_run_config`."""
    config = to_run_config(tree)
    assert isinstance(config, Config)
    return config


def to_run_config(tree: DictConfig) -> RunConfig:
    """Converts the composed tree of a training or of a script into the schema's dataclasses.

    Raises:
        RequestError: a value that the user must give is missing, a key was added that the schema does not have
            (``+train.stpes=1``), an item of a list is of another type, an interpolation cannot be resolved, or a
            user's file of a group names an option that is not there.
    """
    try:
        if added := next(_added_keys(tree), None):
            from ortlaunch.config.meant import unknown_key

            raise RequestError(unknown_key(added))
        missing = OmegaConf.missing_keys(tree)
        if missing:
            key = sorted(missing)[0]
            raise RequestError(f"{key} is not set: give it on the command line, {key}=VALUE")
        config = OmegaConf.to_object(_with_plain_trackers(tree))
    except (MissingMandatoryValue, OmegaConfBaseException) as error:
        raise RequestError(f"configuration: {first_line(error)}") from error
    assert isinstance(config, RunConfig)
    check_items(config)
    _check_options(config)
    return config


def _check_options(config: RunConfig) -> None:
    """Checks the options that a user's own file may have chosen: `load_config` looks for their schemas by name."""
    for group in _CHECKED:
        node = getattr(config, group, None)
        if node is None:
            continue
        if group == "launcher":
            launcher_schema(node.name)
        elif node.name not in GROUPS[group]:
            known = ", ".join(sorted(GROUPS[group]))
            raise RequestError(f"{group}.name={node.name!r}: there is no such {group} (there are {known})")
        if type(node) in _BASES and type(node) not in GROUPS[group].values():
            raise without_keys(group, node.name)


def without_keys(group: str, name: str) -> RequestError:
    """The error of a user's file that names an option of a group and has not its schema."""
    return RequestError(
        f"{group}: the file that sets name: {name} has not its keys: begin it with "
        f"defaults: [/schema/{group}/{name}@_here_, _self_]"
    )


def _with_plain_trackers(tree: DictConfig) -> DictConfig:
    """Replaces the trackers' dataclasses by plain values: workers may be unable to import a user's dataclass."""
    plain = OmegaConf.to_container(tree.trackers, resolve=True, enum_to_str=True)
    tree = copy.deepcopy(tree)
    with open_dict(tree):
        tree.trackers = plain
    return tree


def _added_keys(tree: DictConfig, prefix: str = "") -> Iterator[str]:
    """The dotted keys of a tree that its schema does not have."""
    schema = OmegaConf.get_type(tree)
    if not dataclasses.is_dataclass(schema):
        return
    known = {field.name for field in dataclasses.fields(schema)}
    for key in map(str, tree):
        if key not in known:
            yield f"{prefix}{key}"
        elif not OmegaConf.is_missing(tree, key) and isinstance(tree[key], DictConfig):
            yield from _added_keys(tree[key], f"{prefix}{key}.")


def save_config(config: RunConfig, path: Path) -> None:
    """Writes a resolved configuration without its secrets. `load_config` reads it."""
    replace_text(path, OmegaConf.to_yaml(OmegaConf.create(hidden("", to_dict(config)))))


def load_config(path: Path) -> Config:
    """Reads the configuration of a training that a launcher wrote; otherwise like `load_run_config`.

    Raises:
        RequestError: the run is that of a script; and those of `load_run_config`.
    """
    config = load_run_config(path)
    if not isinstance(config, Config):
        raise RequestError(f"{path.parent} is the run of a script: it has no model that ortlaunch knows")
    return config


def load_run_config(path: Path) -> RunConfig:
    """Reads the configuration that a launcher wrote. Workers use it, so it does without Hydra.

    Secrets, which the file does not hold, come from the environment; see `ortlaunch.config.hidden`.

    Raises:
        FileNotFoundError: there is no file.
        RequestError: the launcher belongs to a package that is not installed here, or the file is damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there")
    settings = restored(read_settings(path), os.environ)
    try:
        return _config_of(settings)
    except (OmegaConfBaseException, KeyError, TypeError, ValueError, AttributeError) as error:
        raise RequestError(f"{path} cannot be read: {first_line(error)}") from error


def _config_of(settings: dict[str, Any]) -> RunConfig:
    stored = OmegaConf.create(settings)
    kind: type[RunConfig] = ScriptRun if "script" in settings else Config
    nodes: dict[str, Any] = {"model": ModelConfig} if kind is Config else {}
    for group, options in GROUPS.items():
        if group not in kind.__dataclass_fields__:
            continue
        # Runs of older versions lack groups that have a default.
        if stored.get(group) is not None or kind.__dataclass_fields__[group].default == MISSING:
            name = stored[group]["name"]
            nodes[group] = launcher_schema(name) if group == "launcher" else options[name]
    merged = OmegaConf.merge(
        OmegaConf.structured(kind(**{k: OmegaConf.structured(v) for k, v in nodes.items()})), stored
    )
    config = OmegaConf.to_object(merged)
    assert isinstance(config, RunConfig)
    return config


def to_dict(node: Any) -> dict[str, Any]:
    """A configuration, or a node of one, as nested dictionaries of plain values. An enum becomes its name."""
    plain = OmegaConf.to_container(OmegaConf.structured(node), resolve=True, enum_to_str=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or the exception's type if it has no message."""
    lines = str(error).strip().splitlines()
    return in_words(lines[0]) if lines else type(error).__name__


def in_words(line: str) -> str:
    """A line of OmegaConf's about a value of another type, in plain words; every other line as it is."""
    return next((found.expand(words) for pattern, words in _OF_TYPES if (found := re.search(pattern, line))), line)
