"""The launchers by name: the built-in ones, and those that installed packages add by an entry point.

::

    [project.entry-points."ortlaunch.launchers"]
    lsf = "mypackage.lsf:LsfLauncher"
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from ortlaunch.base.errors import RequestError
from ortlaunch.config.launchers import announced_launchers, load_launcher
from ortlaunch.config.schema import RunConfig
from ortlaunch.launch.launcher import Launcher, QueueLauncher

LAUNCHERS = {
    "local": "ortlaunch.launch.local.launcher:LocalLauncher",
    "slurm": "ortlaunch.launch.slurm.launcher:SlurmLauncher",
}
"""The class of each built-in launcher as MODULE:CLASS, imported when it is needed."""


def launcher_of(config: RunConfig) -> Launcher:
    """Returns the launcher that a configuration chooses.

    Raises:
        RequestError: it cannot be imported.
    """
    return launcher_named(config.launcher.name)


@functools.cache
def launcher_named(name: str) -> Launcher:
    """Returns the launcher of this name.

    Raises:
        RequestError: there is none, or it cannot be imported.
    """
    target = LAUNCHERS.get(name)
    if target is None:
        launcher = _made(name)
    else:
        module, _, attribute = target.partition(":")
        launcher = getattr(importlib.import_module(module), attribute)()
    if not isinstance(launcher, Launcher):
        raise RequestError(f"launcher={name}: {type(launcher).__qualname__} is no ortlaunch.launch.launcher.Launcher")
    return launcher


def _made(name: str) -> Any:
    """An installed package's launcher.

    Raises:
        RequestError: it cannot be imported or made.
    """
    made = load_launcher(name)
    try:
        return made()
    except Exception as error:
        raise RequestError(f"launcher={name}: {made.__qualname__}: {type(error).__name__}: {error}") from error


def queue_names() -> list[str]:
    """Returns the names of the launchers that submit to a scheduler."""
    return [name for name in (*LAUNCHERS, *announced_launchers()) if queue_named(name) is not None]


def queue_named(name: str) -> QueueLauncher | None:
    """Returns the queue launcher of this name; None if it is not installed here or has no queue."""
    try:
        launcher = launcher_named(name)
    except RequestError:
        return None
    return launcher if isinstance(launcher, QueueLauncher) else None
