"""What is known of a user's modules without importing them: whether they are there, and define what is asked for.

Only what is certain is refused; whatever a module may do to itself or to others while it is imported is left to the
workers, which import it.
"""

from __future__ import annotations

import ast
import os
import re
import symtable
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import decode_source
from pathlib import Path

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import ModelConfig
from ortlaunch.models.params import nearest

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_MAKES_NAMES = frozenset(
    ("__dict__", "__getattr__", "__path__", "eval", "exec", "globals", "locals", "meta_path", "setattr", "vars")
)
"""Names by which a module may come to attributes or submodules that its text does not show."""


def check_source(cfg: ModelConfig, *, same_environment: bool) -> None:
    """Looks for the first of the user's modules that will be imported; a target's name is looked for in its text.

    Args:
        cfg: the model's configuration.
        same_environment: the workers find what this process finds, and not only the folder that it was started in.

    Raises:
        RequestError: a module or a name that is certainly not there, or a text that is no Python.
    """
    if cfg.imports:
        # What it does when it is imported may help the others to be found.
        _find(cfg.imports[0], f"model.imports: {cfg.imports[0]}", same_environment)
    elif cfg.target is not None:
        module, _, path = cfg.target.partition(":")
        where = f"model.target={cfg.target}"
        spec = _find(module, where, same_environment)
        text = _read(spec, module, where, same_environment) if spec is not None else None
        if spec is not None and text is not None:
            _check_name(path, text, spec, module, where)


def no_module(name: str, where: str) -> str:
    """What to say of a module that is not there."""
    return (
        f"{where}: there is no module '{name}', neither in the folder where ortlaunch was started nor in the "
        "environment"
    )


def no_name(path: str, module: str, missing: str, names: list[str], where: str) -> str:
    """What to say of a name that a module does not have.

    Args:
        path: the dotted name that was asked for.
        module: the module's name.
        missing: the part of it that is not there.
        names: those that are.
        where: what asked.
    """
    close = nearest(missing, [name for name in names if not name.startswith("_")])
    hint = f" Did you mean {close}?" if close else ""
    return f"{where}: {module} has no '{path}'.{hint}"


@dataclass(frozen=True)
class _Text:
    """What a module's text says."""

    names: set[str]
    """Those that it binds, on whatever condition."""
    is_all: bool
    """It has no other ones."""


def _find(name: str, where: str, same_environment: bool) -> ModuleSpec | None:
    """Where a module lies; None where that cannot be told."""
    if not _MODULE.fullmatch(name):
        raise RequestError(f"{where}: not of the form package.module")
    known, *others = name.split(".")
    spec = _top_level(known, same_environment)
    if spec is None:
        if same_environment:
            raise RequestError(no_module(known, where))
        return None
    for part in others:
        text = _read(spec, known, where, same_environment)
        # A folder without a text is a package, too. Whatever lies elsewhere than in a folder has a finder of its own.
        is_plain = text.is_all if text is not None else spec.origin is None
        folders = list(spec.submodule_search_locations or ())
        if not is_plain or not all(Path(folder).is_dir() for folder in folders):
            return None
        known = f"{known}.{part}"
        # By its last part alone: of the whole name, the finder looks for the package among the imported modules.
        spec = PathFinder.find_spec(part, folders)
        if spec is None:
            raise RequestError(no_module(known, where))
    return spec


def _top_level(name: str, same_environment: bool) -> ModuleSpec | None:
    """As a worker finds it, which looks first in the folder where ortlaunch was started."""
    here = os.getcwd()
    if not same_environment:
        spec = PathFinder.find_spec(name, [here])
        # A folder without a text gives way to a package that is installed elsewhere.
        return spec if spec is not None and spec.origin is not None else None
    for finder in sys.meta_path:
        spec = finder.find_spec(name, [here, *sys.path])
        if spec is not None:
            return spec
    return None


def _read(spec: ModuleSpec, name: str, where: str, same_environment: bool) -> _Text | None:
    """What a module's text says; None for one that has none, or that another Python may read."""
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
    # A module of a package becomes its attribute once anybody imports it.
    if PathFinder.find_spec(first, list(spec.submodule_search_locations or ())) is None:
        raise RequestError(no_name(path, module, first, sorted(text.names), where))


def _hides_names(tree: ast.Module) -> bool:
    """Whether a module may have names that its text does not show."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module == "sys" or any(one.name == "*" for one in node.names)):
            return True
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.modules":
            return True
        # Not of any attribute: models have methods eval and modules.
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
    """The names that functions declare global: they may bind them."""
    own = {one.get_name() for one in table.get_symbols() if one.is_declared_global()}
    return own.union(*(_globals_of(child) for child in table.get_children()))
