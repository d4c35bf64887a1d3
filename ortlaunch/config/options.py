"""The config groups whose options are classes beside what they configure, in modules of the rest of the package."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from ortlaunch.base.errors import RequestError
from ortlaunch.base.modules import NamedModules, announced

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_Node = TypeVar("_Node", bound=type[Any])


class Options(NamedModules[type[Any]]):
    """The dataclasses of one config group by option name: those of our modules and of installed packages.

    Configuration is read where torch is not installed or must not be imported. These modules therefore import torch
    only inside functions.
    """

    def __init__(self, group: str, package: str, entry_points: str) -> None:
        """
        Args:
            group: the config group.
            package: the package whose modules are the group's options, or the module whose classes are.
            entry_points: the entry-point group in which installed packages announce the dataclasses of their options.
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
        """Our options, and the loaded options of installed packages. Others are left out: they may be broken."""
        ours = self.shipped()
        return iter([*ours, *(name for name in self._registered if name not in ours)])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def _listed(self) -> list[str]:
        if hasattr(import_module(self.package), "__path__"):
            return super()._listed()
        return sorted(name for name, node in self._registered.items() if node.__module__ == self.package)

    def shipped(self) -> list[str]:
        """The names of our own options."""
        return list(super().__iter__())

    def installed(self) -> dict[str, EntryPoint]:
        """The options that installed packages announce, without those that have a name of ours.

        The first call takes 11 ms.
        """
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
"""These groups by name."""


TRAPS = NamedModules[Any]("ortlaunch.ort.verify.traps")
"""The traps of ONNX Runtime that the start of a run checks for, by the names that ``backend.allow`` takes."""


def option(group: str) -> Callable[[_Node], _Node]:
    """Registers a dataclass as an option of a config group.

    The default of its field `name` is the option's name. In a package of ours it is also the module's name.

    Args:
        group: data, optimizer or scheduler.
    """

    def register(node: _Node) -> _Node:
        MODULE_GROUPS[group].register(node.name, node)
        return node

    return register
