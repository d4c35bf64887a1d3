"""Looks at a user's modules without importing them: whether they exist, and whether they define the requested name.

It refuses a module only if it is certain that the import or the name would fail. A module may define names while it is
imported, and only the workers import it.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import symtable
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import decode_source
from pathlib import Path

from ortlaunch.base.errors import RequestError
from ortlaunch.base.modules import in_working_folder
from ortlaunch.base.nearest import nearest
from ortlaunch.base.reading import read_bytes
from ortlaunch.config.schema import ModelConfig

_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_MAKES_NAMES = frozenset(
    ("__dict__", "__getattr__", "__path__", "eval", "exec", "globals", "locals", "meta_path", "setattr", "vars")
)
"""Names in a module's source that let it get attributes or submodules which the source does not show."""


def check_source(cfg: ModelConfig, *, same_environment: bool) -> None:
    """Checks that the first module to be imported exists, and that the source of a target's module has its name.

    Args:
        cfg: the model's configuration.
        same_environment: workers find the same modules as this process. If false, they are only known to share the
            folder that it was started in.

    Raises:
        RequestError: a module or a name certainly does not exist, or a source has a syntax error.
    """
    if cfg.imports:
        # The import of this module may add to the search path, so the later ones cannot be checked.
        _find_module(cfg.imports[0], f"model.imports: {cfg.imports[0]}", same_environment)
    elif cfg.target is not None:
        check_target(cfg.target, "model.target", same_environment=same_environment)


def check_form(target: str, key: str) -> str:
    """Refuses a target that is not ``package.module:name``; returns it with its key, for messages."""
    if not _TARGET.fullmatch(target):
        raise RequestError(f"{key}={target} is not of the form package.module:callable")
    return f"{key}={target}"


def check_target(target: str, key: str, *, same_environment: bool) -> None:
    """Checks that the module of a target exists and that its source has the name.

    Args:
        target: ``package.module:name``.
        key: the key that named it, for messages.
        same_environment: as in `check_source`.

    Raises:
        RequestError: as `check_source`, or the target is not of this form.
    """
    where = check_form(target, key)
    module, _, path = target.partition(":")
    spec = _find_module(module, where, same_environment)
    text = _read(spec, module, where, same_environment) if spec is not None else None
    if spec is not None and text is not None:
        _check_name(path, text, spec, module, where)


def digests(cfg: ModelConfig) -> list[str]:
    """Digests of the sources of the user's modules that a configuration names; empty for one that is not found.

    Other code that they import is not followed.
    """
    modules = [*cfg.imports, *([] if cfg.target is None else [cfg.target.partition(":")[0]])]
    return [_digest(name) for name in modules]


def no_module(name: str, where: str) -> str:
    """The message for a module that does not exist."""
    file = f" (a module is named without .py: {name.removesuffix('.py')})" if name.endswith(".py") else ""
    return (
        f"{where}: there is no module '{name}', neither in the folder where ortlaunch was started nor in the "
        f"environment{file}"
    )


def no_name(path: str, module: str, missing: str, names: list[str], where: str) -> str:
    """The message for a name that a module does not have.

    Args:
        path: the dotted name.
        module: the module's name.
        missing: the part of the dotted name that does not exist.
        names: the names that exist at that place.
        where: the key and value that ask for the name.
    """
    close = nearest(missing, [name for name in names if not name.startswith("_")])
    hint = f" Did you mean {close}?" if close else ""
    return f"{where}: {module} has no '{path}'.{hint}"


@dataclass(frozen=True)
class _Text:
    """The names in a module's source."""

    names: set[str]
    """The names that the source binds, whether or not under a condition."""
    is_all: bool
    """Whether the module can have no other names."""


def _find_module(name: str, where: str, same_environment: bool) -> ModuleSpec | None:
    """Finds a module; None if that is impossible without an import.

    Raises:
        RequestError: the module certainly does not exist.
    """
    if not _MODULE.fullmatch(name):
        raise RequestError(f"{where}: not of the form package.module")
    package, *others = name.split(".")
    spec = _top_level(package, same_environment)
    if spec is None and not same_environment:
        return None  # The workers' environment may have it.
    for part in others:
        if spec is None:
            break
        if not _shows_submodules(spec, package, where, same_environment):
            return None
        package = f"{package}.{part}"
        # The finder gets only the last part: for a dotted name it would look up the package in the imported modules.
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations or ()))
    if spec is None:
        raise RequestError(no_module(package, where))
    return spec


def _digest(module: str) -> str:
    try:
        package, *others = module.split(".")
        spec = _top_level(package, same_environment=True)
        for part in others:
            spec = PathFinder.find_spec(part, list(spec.submodule_search_locations or ()) if spec is not None else [])
        return hashlib.sha256(read_bytes(spec.origin)).hexdigest() if spec is not None and spec.origin else ""
    except (OSError, ValueError, ImportError):
        return ""


def _shows_submodules(spec: ModuleSpec, package: str, where: str, same_environment: bool) -> bool:
    """Whether the folders of a package certainly tell which submodules it has."""
    text = _read(spec, package, where, same_environment)
    # A folder without a source is a (namespace) package too. A package that is not a folder has its own finder.
    is_plain = text.is_all if text is not None else spec.origin is None
    return is_plain and all(Path(folder).is_dir() for folder in spec.submodule_search_locations or ())


def _top_level(name: str, same_environment: bool) -> ModuleSpec | None:
    """Finds a top-level module as a worker does: first in the folder where ortlaunch was started."""
    # An installed package takes precedence over a folder without a source.
    spec = in_working_folder(name)
    if spec is not None or not same_environment:
        return spec
    found = (finder.find_spec(name, [*sys.path, os.getcwd()]) for finder in sys.meta_path)
    return next((spec for spec in found if spec is not None), None)


def _read(spec: ModuleSpec, name: str, where: str, same_environment: bool) -> _Text | None:
    """The names in a module's source; None if it has no source, or one that perhaps another Python can parse."""
    if type(spec.loader) is not SourceFileLoader or spec.origin is None:
        return None
    try:
        text = decode_source(Path(spec.origin).read_bytes())
        tree = ast.parse(text, spec.origin)
        return _Text(_names(symtable.symtable(text, spec.origin, "exec")), not _hides_names(tree))
    except SyntaxError as error:
        if same_environment:
            raise RequestError(f"{where}: importing {name} failed: {error}") from error
    except (OSError, ValueError):
        pass
    return None


def _check_name(path: str, text: _Text, spec: ModuleSpec, module: str, where: str) -> None:
    first = path.partition(".")[0]
    if first in text.names or first.startswith("__") or not text.is_all:
        return
    # A submodule becomes an attribute of its package when it is imported.
    if PathFinder.find_spec(first, list(spec.submodule_search_locations or ())) is None:
        raise RequestError(no_name(path, module, first, sorted(text.names), where))


def _hides_names(tree: ast.Module) -> bool:
    """Whether a module may have names that its source does not show."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module == "sys" or any(one.name == "*" for one in node.names)):
            return True
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.modules":
            return True
        # Other attributes are ignored, because models have methods such as `eval` and `modules`.
        mentioned = {getattr(node, "id", ""), getattr(node, "name", "")}
        if isinstance(node, ast.Attribute) and node.attr.startswith("__"):
            mentioned.add(node.attr)
        if _MAKES_NAMES & mentioned:
            return True
    return False


def _names(table: symtable.SymbolTable) -> set[str]:
    bound = {one.get_name() for one in table.get_symbols() if one.is_assigned() or one.is_imported()}
    return bound.union(*(_globals_of(child) for child in table.get_children()))


def _globals_of(table: symtable.SymbolTable) -> set[str]:
    """The names that functions declare global, because the functions may bind them."""
    own = {one.get_name() for one in table.get_symbols() if one.is_declared_global()}
    return own.union(*(_globals_of(child) for child in table.get_children()))
