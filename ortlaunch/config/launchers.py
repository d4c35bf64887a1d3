"""The keys of every launcher, and the classes of the launchers that installed packages add by an entry point.

The classes of the built-in launchers are in `ortlaunch.launch.table`, above this layer.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import TYPE_CHECKING, Any

from ortlaunch.base.errors import RequestError
from ortlaunch.base.modules import announced
from ortlaunch.config.schema import GROUPS

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

LAUNCHERS = "ortlaunch.launchers"
"""The entry-point group of launchers: NAME = "package.module:Class"."""

_log = logging.getLogger(__name__)


@functools.cache
def announced_launchers() -> dict[str, EntryPoint]:
    """The launchers of installed packages by name, without importing them. One that has a name of ours is left out."""
    found: dict[str, EntryPoint] = {}
    for point in announced(LAUNCHERS):
        if point.name in GROUPS["launcher"] or found.setdefault(point.name, point).value != point.value:
            _log.warning("launcher '%s' (%s) is left out: the name is taken", point.name, point.value)
    return found


@functools.cache
def load_launcher(name: str) -> Any:
    """The launcher class that an installed package announces.

    Raises:
        RequestError: there is no launcher of this name, or it cannot be imported.
    """
    point = announced_launchers().get(name)
    if point is None:
        known = ", ".join(sorted({*GROUPS["launcher"], *announced_launchers()}))
        raise RequestError(f"launcher={name}: there is no such launcher (there are {known}): install its package")
    try:
        found = point.load()
    except Exception as error:
        raise RequestError(
            f"launcher={name}: {point.value} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not (isinstance(found, type) and dataclasses.is_dataclass(getattr(found, "config", None))):
        raise RequestError(f"launcher={name}: {point.value} is no class with a dataclass `config`")
    return found


def launcher_schema(name: str) -> type[Any]:
    """The dataclass of a launcher's keys. The launcher is ours or an installed package's.

    Raises:
        RequestError: as `load_launcher`.
    """
    own = GROUPS["launcher"].get(name)
    found: type[Any] = own if own is not None else load_launcher(name).config
    return found


def launcher_schemas() -> dict[str, type[Any]]:
    """The dataclasses of all launchers' keys by name. Launchers that cannot be imported are left out."""
    found = dict(GROUPS["launcher"])
    for name in announced_launchers():
        try:
            found[name] = load_launcher(name).config
        except RequestError as error:
            _log.warning("%s", error)
    return found
