"""Composes a run's configuration from the command line by Hydra, and explains Hydra's errors."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.command_line import hydra_words
from ortlaunch.config.load import first_line
from ortlaunch.config.meant import unknown_key
from ortlaunch.config.options import MODULE_GROUPS, Options
from ortlaunch.config.paths import conf_dir, group_options, ready_jobs, slurm_profiles
from ortlaunch.config.plugins import announced_launchers, launcher_schema
from ortlaunch.config.schema import GROUPS, OPTIONAL_GROUPS, MlflowConfig, open_model, register_schemas
from ortlaunch.config.synonyms import KEYS
from ortlaunch.config.tracking_uri import default_uri
from ortlaunch.models.registry import available, unknown_model_message
from ortlaunch.tracking import trackers


def run_with_hydra(arguments: list[str], task: Callable[[DictConfig], None]) -> None:
    """Composes the configuration as Hydra does for its own programs and calls `task` with it.

    ``--cfg``, ``--multirun``, ``--config-dir``, shell completion and the rest are Hydra's own; with ``--multirun`` the
    task is called once per combination.

    Args:
        arguments: the command line after the verb.
        task: takes the composed tree.

    Raises:
        RequestError: an option is unknown, or the configuration does not compose.
    """
    import hydra
    from hydra.errors import HydraException

    from ortlaunch.compose.sweep_folder import SweepWatch

    words = hydra_words(arguments)
    _check_optional_groups(arguments)
    _register_options(arguments)
    SweepWatch.latest = None
    sys.argv = [sys.argv[0], *words]
    # Without this, Hydra would print errors in its own way and exit with 1.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(task)()
    except (HydraException, OmegaConfBaseException) as error:
        raise RequestError(explain(error)) from error


def _check_optional_groups(arguments: list[str]) -> None:
    """Says how to choose a group that has no default option. Hydra itself would fail while it merges."""
    for argument in arguments:
        if argument.startswith("jobs="):
            raise RequestError(f"{argument}: a ready job is laid over the defaults: write +{argument}")
    for group in sorted(OPTIONAL_GROUPS):
        if any(argument.startswith(f"+{group}=") for argument in arguments):
            continue
        for argument in arguments:
            if argument.startswith((f"{group}=", f"{group}.")):
                options = ", ".join(sorted(GROUPS[group]))
                raise RequestError(f"{argument}: nothing is chosen yet: add +{group}=NAME, one of {options}")


@dataclasses.dataclass(frozen=True)
class MultirunTask:
    """One combination of a ``--multirun``."""

    folder: Path
    """The sweep's folder."""
    overrides: list[str]
    """The overrides that make this combination."""
    swept: list[str]
    """The keys that a ready job sweeps, as KEY=VALUES; without those of the command line."""


def multirun_task() -> MultirunTask | None:
    """Returns the combination that Hydra is composing now; None without ``--multirun``."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return None
    hydra = HydraConfig.get()
    params = hydra.sweeper.get("params") or {}
    swept = [f"{key}={values}" for key, values in params.items()]
    return MultirunTask(Path(hydra.sweep.dir).absolute(), list(hydra.overrides.task), swept)


def compose(overrides: list[str]) -> DictConfig:
    """Returns the composed tree for some overrides, without Hydra's command line.

    Raises:
        RequestError: the configuration does not compose.
    """
    import hydra
    from hydra.errors import HydraException

    _check_optional_groups(overrides)
    _register_options(overrides)
    try:
        with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return hydra.compose("config", overrides=overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise RequestError(explain(error)) from error


def _register_options(overrides: list[str]) -> None:
    """Registers the schema, and what has no file under ``conf/``, such as models and options of installed packages."""
    from hydra.core.config_store import ConfigStore

    register_schemas()
    # MLflow's own variable is a default, which any setting of tracking.uri overrides.
    ConfigStore.instance().store(group="schema/tracking", name="mlflow", node=MlflowConfig(uri=default_uri()))
    if _may_choose(overrides, "tracking", "trackers", "jobs"):
        _register_trackers()
    # Asking all installed packages and reading all these files would take a fifth of the time of a short command.
    others = set(available()) - set(group_options("model")) if _may_choose(overrides, "model", "jobs") else ()
    for name in others:
        ConfigStore.instance().store(group="model", name=name, node=open_model(name))
    if _may_choose(overrides, "launcher=", "jobs"):
        _register_launchers(overrides)
    for group, options in MODULE_GROUPS.items():
        if _may_choose_installed(overrides, group, options):
            _register_installed(overrides, group, options)
    ConfigStore.instance().store(group="launcher/slurm_profile", name="none", node={}, package="launcher")
    if _may_choose(overrides, "slurm", "jobs"):
        _register_profiles(overrides)
    if _may_choose(overrides, "jobs"):
        _register_jobs(overrides)


def _register_trackers() -> None:
    """Registers trackers other than MLflow as options of `tracking`. Each has its own keys, so several can combine."""
    from hydra.core.config_store import ConfigStore

    for name in trackers.names():
        # A tracker that cannot be loaded must not stop a run that does not use it.
        with contextlib.suppress(RequestError):
            if name != trackers.MAIN:
                node = trackers.node(name)
                ConfigStore.instance().store(group="tracking", name=name, node=node, package=f"trackers.{name}")


def _may_choose(words: list[str], *names: str) -> bool:
    """Returns whether a group of this name may be used: by a word, by the user's own files, or by completion."""
    options = ("--config", "-c", "--shell", "-s")
    return any(word.startswith(options) or any(name in word for name in names) for word in words)


def _register_launchers(overrides: list[str]) -> None:
    """Registers the launchers of installed packages, with the keys of their dataclasses.

    Raises:
        RequestError: the chosen one cannot be imported. Others are skipped.
    """
    from hydra.core.config_store import ConfigStore

    for name in announced_launchers():
        try:
            node = launcher_schema(name)
        except RequestError:
            if f"launcher={name}" in overrides:
                raise
            continue
        ConfigStore.instance().store(group="launcher", name=name, node=node)


def _may_choose_installed(overrides: list[str], group: str, options: Options) -> bool:
    """Returns whether an option of an installed package may be used: the command line or a ready job may name it."""
    values = [word.partition("=")[2] for word in overrides if word.lstrip("+").startswith(f"{group}=")]
    return _may_choose(overrides, "jobs") or not {name for text in values for name in text.split(",")} <= {
        *options.shipped()
    }


def _register_installed(overrides: list[str], group: str, options: Options) -> None:
    """Registers the options of installed packages.

    Raises:
        RequestError: the chosen one cannot be imported. An error in another must not stop the run.
    """
    from ortlaunch.config.option_nodes import store_option

    for name in options.installed():
        if {f"{group}={name}", f"+{group}={name}"} & set(overrides):
            # An error is raised here, and not while Hydra composes, because Hydra would add its own text.
            options[name]
        store_option(group, name)


def _register_profiles(overrides: list[str]) -> None:
    """Registers the cluster profiles as options of a group below the launcher. Their keys are the launcher's.

    Raises:
        RequestError: the chosen one cannot be read. Others are skipped.
    """
    for name, path in slurm_profiles().items():
        _register_file("launcher/slurm_profile", name, path, "launcher", overrides)


def _register_jobs(overrides: list[str]) -> None:
    """Registers the ready jobs. Their keys are those of the whole configuration.

    Raises:
        RequestError: the chosen one cannot be read. Others are skipped.
    """
    for name, path in ready_jobs().items():
        _register_file("jobs", name, path, "_global_", overrides)


def _register_file(group: str, name: str, path: Path, package: str, overrides: list[str]) -> None:
    from hydra.core.config_store import ConfigStore

    is_chosen = bool({f"{group}={name}", f"+{group}={name}"} & set(overrides))
    try:
        keys = OmegaConf.load(path)
        misread = _times_without_quotes(path) if is_chosen else []
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        if is_chosen:
            raise RequestError(f"{group}={name}: {path} cannot be read: {error}") from error
        return
    if misread:
        line, time = misread[0]
        raise RequestError(f'{group}={name}: {path}, line {line}: YAML takes {time} for a number: write "{time}"')
    ConfigStore.instance().store(group=group, name=name, node=keys, package=package)


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


def explain(error: Exception) -> str:
    """Returns one message for an error of Hydra or OmegaConf: the key or option, and the nearest right one."""
    from hydra.errors import OverrideParseException

    text = str(error)
    if "launcher/slurm_profile" in text and "No match in the defaults list" in text:
        return "launcher/slurm_profile: profiles belong to launcher=slurm: give that too"
    if "In 'schema/tracking/" in text and "is not a subclass of" in text:
        return "tracking: none means no tracker, so it is not combined with mlflow: leave it out of the list"
    if option := re.search(r"Could not (?:find|load) '([^']+)/([^/']+)'", text):
        return _unknown_option(option[1], option[2], text)
    if key := re.search(r"Key '[^']+' (?:is )?not in .*?full_key: (\S+)", text, re.DOTALL):
        return _unknown_key(key[1])
    if key := re.search(r"^Could not override '([^'@]+)'", text):
        return _unknown_key(key[1])
    if isinstance(error, OverrideParseException):
        if "=" not in error.override:
            return f"{error.override}: keys are given as KEY=VALUE (ortlaunch --help)"
        return (
            f"{error.override}: not understood. A value with special characters needs quotes that reach ortlaunch: "
            "KEY='\"VALUE\"'"
        )
    if several := re.search(r"^Ambiguous value for argument '([^=]+)=(.*?)'$", text, re.MULTILINE):
        name, values = several[1], several[2]
        return (
            f"{name}={values}: several values: add --multirun to run them one after the other, or compare them by "
            f"ortlaunch bench; a list that is one value is written '{name}=[{values}]'"
        )
    if override := re.search(r"Error merging override (\S+)", text):
        return f"{override[1]}: {_cause(error)}"
    return "configuration: " + " ".join(line.strip() for line in text.strip().splitlines()[:2])


def _unknown_option(group: str, name: str, text: str) -> str:
    if group == "model":
        return unknown_model_message(name)
    available = re.findall(r"^\t(\S+)$", text, re.MULTILINE) or sorted(GROUPS.get(group, {}))
    if group == "tracking":
        if (reason := trackers.why_missing(name)) is not None:
            return reason
        available = sorted({*trackers.names(), trackers.NONE})
    elsewhere = [option for option in KEYS.get(name.lower(), ()) if option.startswith(f"{group}=")]
    hint = f". Did you mean {elsewhere[0]}?" if elsewhere else _nearest(name, available, f"{group}=")
    return f"{group}={name}: no such option{hint} (there are {', '.join(available)})"


def _unknown_key(key: str) -> str:
    group, _, rest = key.partition(".")
    if group == "trackers" and (name := rest.partition(".")[0]) in trackers.names():
        return f"{key}: no such key of a chosen tracker; {name} is chosen by tracking=[mlflow,{name}]"
    return unknown_key(key)


def _nearest(name: str, names: list[str], prefix: str = "") -> str:
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f". Did you mean {prefix}{found[0]}?" if found else ""


def _cause(error: Exception) -> str:
    return first_line(error.__cause__) if error.__cause__ is not None else first_line(error)
