"""Composes a run's configuration from the command line by Hydra."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict

from ortlaunch.base.errors import RequestError
from ortlaunch.base.secrets import without_secrets, without_secrets_of
from ortlaunch.compose.composing import CONFIG, VERSION_BASE, composed
from ortlaunch.compose.hydra_options import register_options, sets_hydra
from ortlaunch.compose.overrides import check_overrides, no_runs
from ortlaunch.config.backends import DEFAULT, why_default
from ortlaunch.config.paths import conf_dir
from ortlaunch.config.schema import GROUPS, OPTIONAL_GROUPS


def run_with_hydra(arguments: list[str], task: Callable[[DictConfig], object], root: str = CONFIG) -> None:
    """Composes the configuration as Hydra does for its own programs and calls `task` with it.

    ``--cfg``, ``--multirun``, ``--config-dir``, shell completion and the rest are Hydra's own; with ``--multirun`` the
    task is called once per combination.

    Args:
        arguments: the command line after the verb.
        task: takes the composed tree; what it returns is for a sweeper.
        root: the root file in ``conf/``.

    Raises:
        RequestError: an option is unknown, or the configuration does not compose.
    """
    from ortlaunch.compose.sweep_folder import SweepWatch

    SweepWatch.latest = None
    if _are_keys_alone(arguments):
        _call_with_tree(arguments, task, root)
        return
    # The parser of options is imported for them alone.
    import hydra

    from ortlaunch.compose.command_line import hydra_words

    words, options = hydra_words(arguments)
    _check_optional_groups(arguments)
    register_options(arguments)
    sys.argv = [sys.argv[0], *words]
    # Without this, Hydra would print errors in its own way and exit with 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    watched = _Task(task)
    try:
        with _public_output(shows=bool(options.cfg or options.info)):
            hydra.main(version_base=VERSION_BASE, config_path=str(conf_dir()), config_name=root)(watched)()
    except Exception as error:
        # Whatever Hydra fails with, it has read nothing but this command line and the files that it names.
        raise watched.failure or _explained(error) from error
    if watched.failure is not None:
        raise watched.failure
    # Hydra goes through a sweep of no runs without a word.
    if watched.is_due and _runs_tasks(options):
        raise no_runs(options.overrides, [options.config_dir or ""])


def _runs_tasks(options: argparse.Namespace) -> bool:
    """Whether Hydra is to run something, and not only to show it."""
    return not (options.cfg or options.info or options.help or options.hydra_help or options.shell_completion)


def _are_keys_alone(arguments: list[str]) -> bool:
    """Whether the words are KEY=VALUE without options, and set no key of Hydra's own."""
    return all("=" in word and not word.startswith("-") for word in arguments) and not sets_hydra(arguments)


def _call_with_tree(words: list[str], task: Callable[[DictConfig], object], root: str) -> None:
    """Composes once and calls the task, as Hydra's program would. That would copy the configuration several times.

    Raises:
        RequestError: the configuration does not compose.
    """
    from hydra.core.hydra_config import HydraConfig

    tree = _composed(words, root)
    # `multirun_task` and `backend_reason` read it.
    HydraConfig.instance().set_config(tree)
    task(_without_hydra(tree))


class _Task:
    """What Hydra calls with each composed tree, until one fails. It keeps the error: Hydra would print its own text."""

    def __init__(self, task: Callable[[DictConfig], object]) -> None:
        self._task = task
        self.failure: Exception | None = None
        self.is_due = True
        """It has not been called yet."""

    def __call__(self, tree: DictConfig) -> object:
        self.is_due = False
        if self.failure is None:
            try:
                return self._task(tree)
            except Exception as error:
                self.failure = error
        return None


@contextlib.contextmanager
def _public_output(*, shows: bool) -> Iterator[None]:
    """Removes secrets from what Hydra itself prints.

    Args:
        shows: whether it prints the configuration (``--cfg``, ``--info``).
    """
    if not shows:
        yield
        return
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        sys.stdout.write("".join(_public_line(line) for line in printed.getvalue().splitlines(keepends=True)))


def _public_line(line: str) -> str:
    found = re.fullmatch(r"(\s*(?:- )?)([\w.-]+): (.*)(\n?)", line)
    if found is None:
        return without_secrets(line)
    return f"{found[1]}{found[2]}: {without_secrets_of(found[2], found[3])}{found[4]}"


def _check_optional_groups(arguments: list[str]) -> None:
    """Says how to choose a group that has no default option. Hydra itself would fail while it merges."""
    for argument in arguments:
        if argument.startswith("jobs="):
            raise RequestError(f"{argument}: a ready job is added to the defaults: write +{argument}")
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
    by_results: bool
    """Whether a sweeper of a package chooses it by what the runs before it returned."""


def multirun_task() -> MultirunTask | None:
    """Returns the combination that Hydra is composing now; None without ``--multirun``."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return None
    hydra = HydraConfig.get()
    params = hydra.sweeper.get("params") or {}
    swept = [f"{key}={values}" for key, values in params.items()]
    from ortlaunch.compose.sweep_folder import sweep_folder

    # Hydra composes each combination anew, with the folder as conf/config.yaml names it.
    watched = sweep_folder()
    folder = Path(hydra.sweep.dir).absolute() if watched is None else watched.path
    by_results = not hydra.sweeper["_target_"].endswith(".BasicSweeper")
    return MultirunTask(folder, list(hydra.overrides.task), swept, by_results)


def backend_reason() -> str | None:
    """Returns why the configuration that Hydra is composing now has not ORT as its backend, in one line.

    None if it has, or if somebody chose the backend: on the command line, in a ready job or in a file of their own.
    """
    from hydra.core.hydra_config import HydraConfig

    return _reason(HydraConfig.get()) if HydraConfig.initialized() else None


def _reason(hydra: Any) -> str | None:
    return why_default() if hydra.runtime.choices.get("backend") == DEFAULT else None


def compose(overrides: list[str]) -> DictConfig:
    """Returns the composed tree for some overrides, without Hydra's command line.

    Raises:
        RequestError: the configuration does not compose.
    """
    return compose_with_reason(overrides)[0]


def compose_with_reason(overrides: list[str], root: str = CONFIG) -> tuple[DictConfig, str | None]:
    """Returns the composed tree for some overrides, and why its backend is not ORT; see `backend_reason`.

    Args:
        overrides: the words of the command line.
        root: the root file in ``conf/``.

    Raises:
        RequestError: the configuration does not compose.
    """
    tree = _composed(overrides, root)
    reason = _reason(tree.hydra)
    return _without_hydra(tree), reason


def _composed(overrides: list[str], root: str = CONFIG) -> DictConfig:
    """The composed tree with Hydra's own part, which tells what was chosen.

    Raises:
        RequestError: the configuration does not compose.
    """
    _check_optional_groups(overrides)
    check_overrides(overrides, [])
    register_options(overrides)
    try:
        return composed(overrides, root)
    except Exception as error:
        raise _explained(error) from error


def _explained(error: Exception) -> RequestError:
    # Imported for errors alone.
    from ortlaunch.compose.hydra_errors import explain

    return RequestError(explain(error))


def _without_hydra(tree: DictConfig) -> DictConfig:
    with open_dict(tree):
        del tree["hydra"]
    return tree
