"""The config groups whose options are modules: each one holds an option's dataclass and what it does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from ortlaunch.base.errors import RequestError
from ortlaunch.base.modules import NamedModules, announced

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_Node = TypeVar("_Node", bound=type[Any])


class Options(NamedModules[type[Any]]):
    """The dataclasses of one config group by option: those of our modules, then those of installed packages.

    Configuration is read where torch is not installed or must not be imported, so these modules import it in functions.
    """

    def __init__(self, group: str, package: str, entry_points: str) -> None:
        """
        Args:
            group: the config group.
            package: the package whose modules are the group's options.
            entry_points: the entry-point group in which installed packages announce dataclasses as further options.
        """
        super().__init__(package)
        self.group = group
        self.entry_points = entry_points

    def __getitem__(self, name: str) -> type[Any]:
        if super().__contains__(name):
            return super().__getitem__(name)
        node = self._load(self.installed()[name])
        self.register(name, node)
        return node

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self.installed()

    def __iter__(self) -> Iterator[str]:
        """Our options, and those of installed packages that have been asked for: others may be broken."""
        ours = self.shipped()
        return iter([*ours, *(name for name in self._registered if name not in ours)])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def shipped(self) -> list[str]:
        """Names of our own options."""
        return list(super().__iter__())

    def installed(self) -> dict[str, EntryPoint]:
        """What installed packages announce, without the names that are ours; the first call takes 11 ms."""
        ours = set(self.shipped())
        return {point.name: point for point in announced(self.entry_points) if point.name not in ours}

    def _load(self, point: EntryPoint) -> type[Any]:
        package = point.dist.name if point.dist is not None else point.module
        where = f"{self.group}={point.name} ({point.value} of the package {package})"
        try:
            node = point.load()
        except Exception as error:
            raise RequestError(f"{where}: cannot be imported: {type(error).__name__}: {error}") from error
        if not dataclasses.is_dataclass(node) or getattr(node, "name", None) != point.name:
            raise RequestError(f"{where}: is not a dataclass whose field name is '{point.name}'")
        return node if isinstance(node, type) else type(node)


MODULE_GROUPS = {
    options.group: options
    for options in (
        Options("data", "ortlaunch.data.sources", "ortlaunch.data"),
        Options("optimizer", "ortlaunch.trainer.optimizers", "ortlaunch.optimizers"),
        Options("scheduler", "ortlaunch.trainer.schedules", "ortlaunch.schedulers"),
    )
}
"""Those groups by name."""


TRAPS = NamedModules[Any]("ortlaunch.ort.verify.traps")
"""The traps of ONNX Runtime that are looked for at a run's start, by the names that ``backend.allow`` takes."""


def option(group: str) -> Callable[[_Node], _Node]:
    """Makes a dataclass the option of a config group that its field `name` says, as its module is called.

    Args:
        group: data, optimizer or scheduler.
    """

    def register(node: _Node) -> _Node:
        MODULE_GROUPS[group].register(node.name, node)
        return node

    return register
