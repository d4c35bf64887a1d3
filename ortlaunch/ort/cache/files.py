"""Finds out whose code a file holds, and identifies files and installed packages by digests and versions."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path

import torch

import ortlaunch
from ortlaunch.base.own_code import is_put_there_by_pip

_SITES = {"site-packages", "dist-packages"}
_origins: dict[str, tuple[types.ModuleType | None, Origin]] = {}
"""The owner of each module that has a file or is built in, by its name."""


class NotCacheableError(Exception):
    """The graph may depend on something that cannot be described; the message names it."""


class Origin(Enum):
    """The owner of a file's code."""

    USER = "user"
    INSTALLED = "installed"
    """A package whose version is part of the key."""
    OWN = "own"
    """torch, the standard library and ortlaunch, each described as a whole."""


@functools.cache
def origin(file: str) -> Origin:
    """Returns the owner of the code in a file, which is named as in a code object."""
    return file_origin(file, is_installed, [torch_folder(), stdlib_folder(), Path(ortlaunch.__file__).parent])


def module_origin(name: object) -> Origin:
    """Returns the owner of a module; an unknown module counts as the program's own."""
    if not isinstance(name, str):
        return Origin.USER
    module = sys.modules.get(name)
    known = _origins.get(name)
    # A description asks for the same few modules thousands of times. The module is kept, so that it stays unique.
    if known is not None and known[0] is module:
        return known[1]
    file = getattr(module, "__file__", None)
    if isinstance(file, str):
        found = origin(file)
    elif name in sys.builtin_module_names:
        found = Origin.OWN
    else:
        # Packages also make modules without a file, such as torch._C._profiler.
        file = getattr(sys.modules.get(name.partition(".")[0]), "__file__", None)
        return origin(file) if isinstance(file, str) else Origin.USER
    _origins[name] = module, found
    return found


def function_origin(function: types.FunctionType) -> Origin:
    """Returns the owner of a function's code."""
    name = function.__code__.co_filename
    # The methods of a dataclass have no file.
    return module_origin(function.__globals__.get("__name__")) if name == "<string>" else origin(name)


def file_origin(name: str, is_installed: Callable[[Path], bool], own: list[Path]) -> Origin:
    """Returns the owner of a file's code.

    Args:
        name: the file's name, as a code object has it.
        is_installed: whether a file belongs to an installed package.
        own: folders of torch, ortlaunch and the standard library.
    """
    path = Path(name)
    if name.startswith("<frozen") or path.suffix == ".so":
        return Origin.OWN
    if any(path.is_relative_to(folder) for folder in own) and not _is_package_in_stdlib(path, own):
        return Origin.OWN
    return Origin.INSTALLED if is_installed(path) else Origin.USER


def _is_package_in_stdlib(path: Path, own: list[Path]) -> bool:
    # Outside a virtual environment the packages are in a subfolder of the standard library.
    if not _SITES & set(path.parts):
        return False
    inner = [folder for folder in own if _SITES & set(folder.parts)]
    return not any(path.is_relative_to(folder) for folder in inner)


@functools.cache
def is_installed(path: Path) -> bool:
    """Whether a file belongs to the standard library, an installed package or ortlaunch."""
    sites = [Path(entry) for entry in sys.path if entry.endswith(tuple(_SITES))]
    is_in_site = any(path.is_relative_to(folder) for folder in (*_installed_folders(), *sites))
    return is_in_site or is_stdlib(path) or is_put_there_by_pip(path)


@functools.cache
def _installed_folders() -> tuple[Path, ...]:
    """Returns the folders of installed packages that do not depend on ``sys.path``, and ours."""
    paths = sysconfig.get_paths()
    return (*(Path(paths[key]) for key in ("purelib", "platlib")), Path(ortlaunch.__file__).parent)


@functools.cache
def torch_folder() -> Path:
    """Returns the folder of torch's code."""
    return Path(torch.__file__).parent


def is_stdlib(path: Path) -> bool:
    """Whether a file belongs to the standard library."""
    # Outside a virtual environment the packages are in a subfolder of the standard library.
    return path.is_relative_to(stdlib_folder()) and not _SITES & set(path.parts)


@functools.cache
def stdlib_folder() -> Path:
    """Returns the folder of the standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def user_modules() -> dict[str, Path]:
    """Returns imported modules that belong to neither the standard library, an installed package nor ortlaunch."""
    modules = {}
    for name, module in list(sys.modules.items()):
        # The top-level package decides, because packages also create modules without a file or with unusual ones.
        top = getattr(sys.modules.get(name.partition(".")[0]), "__file__", None)
        file = getattr(module, "__file__", None)
        if isinstance(top, str) and isinstance(file, str) and not _is_file_installed(top):
            modules[name] = Path(file)
    return modules


@functools.cache
def _is_file_installed(file: str) -> bool:
    return is_installed(Path(file))


def digest(path: Path) -> str:
    """Returns a digest of a file's content.

    Raises:
        NotCacheableError: the file cannot be read.
    """
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise NotCacheableError(f"{path} cannot be read: {error}") from error


def digest_of_files(paths: Iterable[Path]) -> str:
    """Returns one digest of the content of several files."""
    return hashlib.sha256("".join(digest(path) for path in paths).encode()).hexdigest()


def installed_packages() -> str:
    """Returns a digest of the names and versions of all installed packages.

    A package may read another one that the model does not name, or ask whether it is installed.
    """
    names: set[str] = set()
    for entry in sys.path:
        if entry and Path(entry).is_dir():
            names |= {path.name for path in Path(entry).iterdir() if path.suffix in (".dist-info", ".egg-info", ".pth")}
    return hashlib.sha256(repr(sorted(names)).encode()).hexdigest()


@functools.cache
def distributions() -> Mapping[str, list[str]]:
    """Returns the packages that install each module."""
    return importlib.metadata.packages_distributions()


def version(package: str) -> str | None:
    """Returns the version of an installed package; None if there is no package of this name."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_stdlib_module(name: str) -> bool:
    """Whether a module belongs to the standard library."""
    return name.partition(".")[0] in sys.stdlib_module_names
