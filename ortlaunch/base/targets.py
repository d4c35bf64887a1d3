"""The user's own code by ``package.module:name``: looked at without an import, imported, its arguments checked.

The look refuses a module only if it is certain that the import or the name would fail. A module may define names while
it is imported, and only the workers import it.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import re
import symtable
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import decode_source
from pathlib import Path
from types import ModuleType
from typing import Any

from ortlaunch.base.errors import RequestError
from ortlaunch.base.modules import import_named, in_working_folder
from ortlaunch.base.nearest import nearest
from ortlaunch.base.reading import read_bytes

_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_MAKES_NAMES = frozenset(
    ("__dict__", "__getattr__", "__path__", "eval", "exec", "globals", "locals", "meta_path", "setattr", "vars")
)
"""Names in a module's source that let it get attributes or submodules which the source does not show."""


def load_target(target: str, where: str, importer: Callable[[str], ModuleType] = import_named) -> Callable[..., Any]:
    """Imports ``package.module:callable``; the caller has called `ortlaunch.base.modules.add_working_folder`.

    Args:
        target: what to import.
        where: the key and its value, or what else named it, for messages.
        importer: imports a module by name; `importlib.import_module` for what the user has not named.

    Raises:
        RequestError: there is no such module or name, or it is nothing that can be called.
    """
    module, _, path = target.partition(":")
    found: Any = load_module(module, where, importer)
    for part in path.split("."):
        if not hasattr(found, part):
            raise RequestError(_no_name(path, module, part, dir(found), where))
        found = getattr(found, part)
    if not callable(found):
        raise RequestError(f"{where}: '{path}' is a {type(found).__name__}, not a class or function")
    return found  # type: ignore[no-any-return]


def load_module(name: str, where: str, importer: Callable[[str], ModuleType] = import_named) -> ModuleType:
    """Imports a module; the arguments and the errors are those of `load_target`."""
    try:
        return importer(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise RequestError(f"{where}: importing {name} failed: {error}") from error
        raise RequestError(_no_module(error.name, where)) from error
    except (ImportError, SyntaxError) as error:
        raise RequestError(f"{where}: importing {name} failed: {error}") from error


def check_arguments(
    called: Callable[..., Any],
    params: Mapping[str, Any],
    owner: str,
    key: str,
    *,
    given: Collection[str] = (),
    positional: int = 0,
) -> None:
    """Checks that a class or function can be called with `params`. It reads the signature and does not call.

    Args:
        called: the class or function.
        params: the user's arguments by name.
        owner: what is called, for messages.
        key: the key that holds `params`.
        given: the names that ortlaunch passes itself.
        positional: how many arguments ortlaunch passes without their names.

    Raises:
        RequestError: there is no parameter of a name (and no ``**kwargs``), one is missing, or there are too few for
            what is passed without names.
    """
    try:
        arguments = list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):  # Some callables that are written in C have no signature.
        return
    in_order = [argument for argument in arguments if argument.kind in _BY_PLACE][:positional]
    is_open = any(argument.kind is inspect.Parameter.VAR_POSITIONAL for argument in arguments)
    if len(in_order) < positional and not is_open:
        raise RequestError(f"{owner} takes {len(in_order)} arguments and is called with {positional}")
    arguments = [argument for argument in arguments if argument not in in_order]
    named = {argument.name: argument for argument in arguments if argument.kind in _BY_NAME}
    if not any(argument.kind is inspect.Parameter.VAR_KEYWORD for argument in arguments):
        refuse_unknown(params, named.keys() - set(given), owner, key)
    missing = [
        name
        for name, argument in named.items()
        if argument.default is inspect.Parameter.empty and name not in params and name not in given
    ]
    if missing:
        keys = ", ".join(f"{key}.{name}" for name in missing)
        raise RequestError(f"{owner} cannot be built without {keys}: give {'it' if len(missing) == 1 else 'them'}")


def refuse_unknown(names: Iterable[str], accepted: Iterable[str], owner: str, key: str) -> None:
    """Checks the names of arguments, the keys below `key`, against those that `owner` accepts.

    Raises:
        RequestError: a name is not accepted. The message lists the accepted names and suggests the nearest.
    """
    known = sorted(accepted)
    for name in names:
        if name in known:
            continue
        close = nearest(name, known)
        hint = f" Did you mean {key}.{close}?" if close else ""
        listed = ", ".join(known) if known else "none at all"
        raise RequestError(f"{key}.{name}: {owner} has no parameter of this name.{hint} It accepts: {listed}")


def with_arguments(entry: Any, key: str, word: str) -> tuple[str, dict[str, Any]]:
    """What an entry of a list names, and the arguments beside it: a text, or a mapping with `word` and arguments.

    Raises:
        RequestError: it is neither.
    """
    arguments = dict(entry) if isinstance(entry, Mapping) else {word: entry}
    name = arguments.pop(word, None)
    if not isinstance(name, str):
        raise RequestError(f"{key}: {entry!r} names nothing: give a text, or a mapping with {word} and arguments")
    return name, {str(one): value for one, value in arguments.items()}


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
        same_environment: as in `check_module`.

    Raises:
        RequestError: a module or the name certainly does not exist, a source has a syntax error, or the target is not
            of this form.
    """
    where = check_form(target, key)
    module, _, path = target.partition(":")
    spec = check_module(module, where, same_environment=same_environment)
    text = _read(spec, module, where, same_environment) if spec is not None else None
    if spec is not None and text is not None:
        _check_name(path, text, spec, module, where)


def check_module(name: str, where: str, *, same_environment: bool) -> ModuleSpec | None:
    """Finds a module; None if that is impossible without an import.

    Args:
        name: the module's full name.
        where: the key and its value, for messages.
        same_environment: workers find the same modules as this process. If false, they are only known to share the
            folder that it was started in.

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
        raise RequestError(_no_module(package, where))
    return spec


def digest(module: str) -> str:
    """A digest of the source of a user's module; empty if it is not found. Code that it imports is not followed."""
    try:
        package, *others = module.split(".")
        spec = _top_level(package, same_environment=True)
        for part in others:
            spec = PathFinder.find_spec(part, list(spec.submodule_search_locations or ()) if spec is not None else [])
        return hashlib.sha256(read_bytes(spec.origin)).hexdigest() if spec is not None and spec.origin else ""
    except (OSError, ValueError, ImportError):
        return ""


@dataclass(frozen=True)
class _Text:
    """The names in a module's source."""

    names: set[str]
    """The names that the source binds, whether or not under a condition."""
    is_all: bool
    """Whether the module can have no other names."""


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
        raise RequestError(_no_name(path, module, first, sorted(text.names), where))


def _no_module(name: str, where: str) -> str:
    """The message for a module that does not exist."""
    file = f" (a module is named without .py: {name.removesuffix('.py')})" if name.endswith(".py") else ""
    return (
        f"{where}: there is no module '{name}', neither in the folder where ortlaunch was started nor in the "
        f"environment{file}"
    )


def _no_name(path: str, module: str, missing: str, names: list[str], where: str) -> str:
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
