"""Registers options without a file under ``conf/`` in Hydra's store, such as those of installed packages."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ortlaunch.base.errors import RequestError
from ortlaunch.base.yaml_files import FAULTS, fault_of
from ortlaunch.config.launchers import announced_launchers, launcher_schema
from ortlaunch.config.option_nodes import store, store_option
from ortlaunch.config.options import MODULE_GROUPS, Options
from ortlaunch.config.paths import group_options, ready_jobs, slurm_profiles
from ortlaunch.config.schema import MlflowConfig, open_model, register_schemas
from ortlaunch.config.tracking_uri import default_uri

_SLURM_DEFAULTS = ["/schema/launcher/slurm@_here_", {"slurm_profile": "none"}]


def register_options(words: list[str]) -> None:
    """Registers the schema, and those options without a file that a command line may choose.

    The others are left out. To ask all installed packages and to read all files would take a fifth of the time of a
    short command.

    Args:
        words: the command line after the verb.

    Raises:
        RequestError: a chosen option cannot be imported or read.
    """
    register_schemas()
    # MLflow's own variable is a default, which any setting of tracking.uri overrides.
    store_option("tracking", "mlflow", lambda: OmegaConf.structured(MlflowConfig(uri=default_uri())))
    # What a site needs is written once, as a profile, and chosen by launcher/slurm_profile=NAME.
    store("launcher", "slurm", lambda: OmegaConf.create({"defaults": _SLURM_DEFAULTS}))
    store("launcher/slurm_profile", "none", OmegaConf.create, package="launcher")
    may_choose_any = _may_choose_any(words)
    if may_choose_any or _mentions(words, "tracking", "trackers"):
        _register_trackers()
    if may_choose_any or _mentions(words, "model"):
        _register_models()
    if may_choose_any or _mentions(words, "launcher="):
        _register_launchers(words)
    for group, options in MODULE_GROUPS.items():
        if may_choose_any or _asks_for_more(words, group, options.shipped()):
            _register_installed(words, group, options)
    if may_choose_any or _mentions(words, "slurm"):
        _register_profiles(words)
    if may_choose_any:
        _register_jobs(words)


def sets_hydra(words: list[str]) -> bool:
    """Whether a key of Hydra's own may be set: on the command line, in a ready job or in a file of the user's."""
    return _may_choose_any(words) or _mentions(words, "hydra")


def _may_choose_any(words: list[str]) -> bool:
    """Whether any option may be needed: ready jobs and the user's own files can choose each, completion lists all."""
    return _mentions(words, "jobs") or any(word.startswith(("--config", "-c", "--shell", "-s")) for word in words)


def _mentions(words: list[str], *texts: str) -> bool:
    """Whether one of the texts occurs anywhere in a command line."""
    return any(text in word for text in texts for word in words)


def _asks_for_more(words: list[str], group: str, options: list[str]) -> bool:
    """Whether a command line chooses an option of a group that is none of these. It may name several, with commas."""
    values = [word.partition("=")[2] for word in words if word.lstrip("+").startswith(f"{group}=")]
    return not {name for value in values for name in value.split(",")} <= {*options}


def _is_chosen(words: list[str], group: str, name: str) -> bool:
    values = [word.partition("=")[2] for word in words if word.lstrip("+").startswith(f"{group}=")]
    return name in {part.strip("[]'\" ") for value in values for part in value.split(",")}


def _store(group: str, name: str, node: Any, package: str | None = None) -> None:
    """Registers an option whose node is there already, or is quickly built."""
    store(group, name, lambda: OmegaConf.structured(node), package)


def _register_trackers() -> None:
    """Registers trackers other than MLflow as options of `tracking`. Each has its own keys, so several can combine."""
    # Imported here and below, because few command lines choose such an option.
    from ortlaunch.tracking import trackers

    for name in trackers.names():
        # A tracker that cannot be loaded must not stop a run that does not use it.
        with contextlib.suppress(RequestError):
            if name != trackers.MAIN:
                _store("tracking", name, trackers.node(name), package=f"trackers.{name}")


def _register_models() -> None:
    from ortlaunch.models.registry import available

    for name in set(available()) - set(group_options("model")):
        _store("model", name, open_model(name))


def _register_launchers(words: list[str]) -> None:
    """Registers the launchers of installed packages, with the keys of their dataclasses.

    Raises:
        RequestError: the chosen one cannot be imported. Others are skipped.
    """
    for name in announced_launchers():
        try:
            node = launcher_schema(name)
        except RequestError:
            if _is_chosen(words, "launcher", name):
                raise
            continue
        _store("launcher", name, node)


def _register_installed(words: list[str], group: str, options: Options) -> None:
    """Registers the options of installed packages.

    Raises:
        RequestError: the chosen one cannot be imported. An error in another must not stop the run.
    """
    for name in options.installed():
        if _is_chosen(words, group, name):
            # An error is raised here, and not while Hydra composes, because Hydra would add its own text.
            options[name]
        store_option(group, name)


def _register_profiles(words: list[str]) -> None:
    """Registers the cluster profiles as options of a group below the launcher. Their keys are the launcher's.

    Raises:
        RequestError: the chosen one cannot be read. Others are skipped.
    """
    for name, path in slurm_profiles().items():
        _register_file(words, "launcher/slurm_profile", name, path, package="launcher")


def _register_jobs(words: list[str]) -> None:
    """Registers the ready jobs. Their keys are those of the whole configuration.

    Raises:
        RequestError: the chosen one cannot be read. Others are skipped.
    """
    for name, path in ready_jobs().items():
        _register_file(words, "jobs", name, path, package="_global_")


def _register_file(words: list[str], group: str, name: str, path: Path, *, package: str) -> None:
    is_chosen = _is_chosen(words, group, name)
    try:
        keys = OmegaConf.load(path)
        misread = _times_without_quotes(path) if is_chosen else []
    except (*FAULTS, OmegaConfBaseException) as error:
        if is_chosen:
            raise RequestError(f"{group}={name}: {path} cannot be read: {fault_of(error)}") from error
        return
    if not isinstance(keys, DictConfig):
        if is_chosen:
            raise RequestError(f"{group}={name}: {path} cannot be read: it holds no keys")
        return
    if misread:
        line, time = misread[0]
        raise RequestError(f'{group}={name}: {path}, line {line}: YAML takes {time} for a number: write "{time}"')
    _store(group, name, keys, package=package)


def _times_without_quotes(path: Path) -> list[tuple[int, str]]:
    """Returns lines with a time such as 24:00:00, which YAML reads as 86400 and SLURM would take for minutes."""
    nodes: list[Any] = [yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)]
    found: list[tuple[int, str]] = []
    while nodes:
        node = nodes.pop()
        if isinstance(node, yaml.MappingNode):
            nodes += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value
        elif isinstance(node, yaml.ScalarNode) and node.tag.endswith(":int") and ":" in node.value:
            found.append((node.start_mark.line + 1, node.value))
    return sorted(found)
