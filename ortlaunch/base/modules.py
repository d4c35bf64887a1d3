"""Finds modules of our packages by name, the user's own modules, and entry points of installed packages."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, SelectableGroups

_Value = TypeVar("_Value")


class NamedModules(Mapping[str, _Value]):
    """A table of values by name. Each module of a package registers one value under the module's own name.

    The package's files give the list of names. A module is imported only when its name is looked up, so a command that
    lists names, or needs one of them, does not import the others. Modules whose names begin with an underscore are not
    listed.
    """

    def __init__(self, package: str) -> None:
        """
        Args:
            package: the package's full name. It is imported when the first name is looked up.
        """
        self.package = package
        self._names: list[str] | None = None
        self._registered: dict[str, _Value] = {}

    def register(self, name: str, value: _Value) -> None:
        """Stores the value of a name. A module that is imported again replaces its value."""
        self._registered[name] = value

    def __getitem__(self, name: str) -> _Value:
        if name not in self._registered:
            if name not in self._listed():
                raise KeyError(name)
            import_module(f"{self.package}.{name}")
            if name not in self._registered:
                raise ImportError(f"{self.package}.{name} registers nothing under the name '{name}'")
        return self._registered[name]

    def __contains__(self, name: object) -> bool:
        return name in self._registered or name in self._listed()

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed())

    def __len__(self) -> int:
        return len(self._listed())

    def _listed(self) -> list[str]:
        if self._names is None:
            files = [file for folder in import_module(self.package).__path__ for file in Path(folder).iterdir()]
            names = [file.stem for file in files if file.suffix == ".py"]
            self._names = sorted(name for name in names if not name.startswith("_"))
        return self._names


def add_working_folder() -> None:
    """Lets this process import modules of the working folder. They come last, so that none hides a library."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)


def in_working_folder(name: str) -> ModuleSpec | None:
    """Finds a top-level module with a source in the working folder."""
    spec = PathFinder.find_spec(name, [os.getcwd()])
    return spec if spec is not None and spec.origin is not None else None


def import_named(name: str) -> ModuleType:
    """Imports a module that the user named. One of the working folder comes before a library of the same name.

    Raises:
        ImportError: as `import_module`, or the library is in use already.
    """
    package = name.partition(".")[0]
    own = in_working_folder(package)
    if own is not None and own.loader is not None:
        there = sys.modules.get(package)
        if there is None:
            sys.modules[package] = module = module_from_spec(own)
            try:
                own.loader.exec_module(module)
            except BaseException:
                del sys.modules[package]
                raise
        elif getattr(there, "__file__", None) != own.origin:
            raise ImportError(f"a library named {package} is in use here: give {own.origin} another name")
    return import_module(name)


def is_missing(package: str, error: ImportError) -> bool:
    """Whether an import failed because a package is not installed.

    Too little memory, a broken library and an error in the package itself raise ImportError too. Installing the
    package again would not help there.
    """
    return isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == package


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """Makes an optional package look as if it were not installed, unless this process has imported it already."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]


def announced(group: str) -> list[EntryPoint]:
    """The entry points of one group in all installed packages.

    The packages' metadata is read once, which takes 11 ms, and again after ``sys.path`` changes.
    """
    return list(_entry_points(tuple(sys.path)).select(group=group))


@cache
def _entry_points(path: tuple[str, ...]) -> SelectableGroups:
    from importlib.metadata import entry_points

    return entry_points()
