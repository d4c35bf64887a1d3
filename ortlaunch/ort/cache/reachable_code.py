"""Collects the code that a model's forward can reach, and the values outside of the model's attributes that it reads.

A graph contains the values that Python code had during the trace: of globals, closures, class attributes and defaults.
Two exports of the same source may differ by any of them. `ReachableCode` follows names. A name in reached code stands
for everything of this name in its globals, in the classes of the model, and in the user's modules that it refers to.
Code that reads a value which cannot be described (a file, the environment, a clock, a random number) is not cacheable.

Installed packages are identified by their versions. Their functions are followed too, because a program may register
its own functions with them, replace theirs, or set their switches.
"""

from __future__ import annotations

import builtins
import dis
import functools
import hashlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch

Describe = Callable[[str, Any], Any]
"""Describes a value as nested lists of plain values; the arguments are its place and the value."""


class NotCacheableError(Exception):
    """The graph may depend on something that cannot be described; the message names it."""


class Origin(Enum):
    """The owner of a file's code."""

    USER = "user"
    INSTALLED = "installed"
    """A package whose version is part of the key."""
    OWN = "own"
    """torch, the standard library and ortlaunch, each described as a whole."""


_PURE = frozenset(
    [
        *("__future__", "abc", "builtins", "collections", "contextlib", "copy", "dataclasses", "decimal", "enum"),
        *("fractions", "functools", "heapq", "inspect", "itertools", "keyword", "logging", "math", "numbers"),
        *("operator", "re", "statistics", "string", "struct", "textwrap", "types", "typing", "warnings", "weakref"),
    ]
)
"""Modules of the standard library whose functions depend on nothing but their arguments."""
_UNKNOWN_VALUES = frozenset(
    ["breakpoint", "eval", "exec", "compile", "globals", "id", "input", "locals", "open", "vars", "__import__"]
)
"""Builtins that read values which cannot be followed by name."""
_BY_ANY_NAME = frozenset(("getattr", "setattr", "hasattr", "delattr", "__dict__", "__getattribute__", "attrgetter"))
"""Names with which code reads attributes whose names are computed at run time."""
_WITHOUT_MEANING = frozenset(
    ("__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__", "__slots__", "__hash__")
) | {"__abstractmethods__", "_abc_impl", "__parameters__", "__orig_bases__", "__static_attributes__", "__match_args__"}
_WITHOUT_MEANING |= {"__dataclass_fields__", "__dataclass_params__", "__repr__", "__str__"}
_CONSTRUCTORS = frozenset(("__init__", "__new__", "__init_subclass__", "__post_init__"))
_NOT_PURE = ("torch.distributed", "numpy.random")
_DIFFERS = "what it gives can differ from run to run, or from worker to worker"
_PLAIN = (type(None), bool, int, float, str, bytes)


class ReachableCode:
    """Collects functions, classes and modules, and follows the names in them."""

    def __init__(self, describe: Describe, origin_of: Callable[[str], Origin]) -> None:
        """
        Args:
            describe: describes a value that code reads; it may add functions and classes to this object.
            origin_of: returns the owner of a file's code.
        """
        self._describe = describe
        self._origin_of = origin_of
        self._names: set[str] = set()
        self._users_names: set[str] = set()
        self._uses_any_name = False
        self._functions: dict[int, types.FunctionType] = {}
        self._classes: dict[int, tuple[type, bool]] = {}
        self._modules: dict[str, types.ModuleType] = {}
        self._facts: dict[str, Any] = {}
        self._done: set[tuple[Any, ...]] = set()

    def add_function(self, function: types.FunctionType) -> None:
        """Adds a function that is reached."""
        self._functions.setdefault(id(function), function)

    def add_class(self, cls: type, *, is_made: bool) -> None:
        """Adds a class whose objects are used by reached code.

        Args:
            cls: the class.
            is_made: whether code may create further objects, so that the constructor is reached too.
        """
        _, was_made = self._classes.get(id(cls), (cls, False))
        self._classes[id(cls)] = (cls, is_made or was_made)

    def facts(self) -> dict[str, Any]:
        """Follows names until nothing new is found.

        Returns:
            For each place, the code of its functions and the values that they read.

        Raises:
            NotCacheableError: the user's code reads a value that cannot be described.
        """
        grew = True
        while grew:
            # All three run each time, because each one finds names that the others follow.
            grew = self._follow_functions() | self._follow_classes() | self._follow_modules()
        return self._facts

    def _is_new(self, *key: Any) -> bool:
        if key in self._done:
            return False
        self._done.add(key)
        return True

    def _follow_functions(self) -> bool:
        found = [function for key, function in list(self._functions.items()) if self._is_new("function", key)]
        for function in found:
            self._read(function)
        return bool(found)

    def _read(self, function: types.FunctionType) -> None:
        origin = self._function_origin(function)
        # A wrapper of torch around another function, such as ``torch.no_grad()``, has the module of that function.
        home = self._module_origin(function.__module__) if origin is Origin.OWN else origin
        if home is Origin.USER:
            self._read_users(function, origin)
        elif home is Origin.INSTALLED:
            self._scan(function, origin)

    def _read_users(self, function: types.FunctionType, origin: Origin) -> None:
        """Reads a user's function: its code, its bound values, and the globals that it names."""
        where = f"{function.__module__}.{function.__qualname__}"
        bound = [function.__defaults__ or (), function.__kwdefaults__ or {}, cells_of(function), vars(function)]
        facts = [self._describe(f"the function {where}", bound)]
        if origin is Origin.USER:
            codes = list(_nested(function.__code__))
            self._users_names |= self._take_names(codes)
            self._uses_any_name |= any(not _BY_ANY_NAME.isdisjoint(code.co_names) for code in codes)
            facts += [_digest(codes), self._globals_of(function, where, codes)]
        self._note(where, facts)

    def _scan(self, function: types.FunctionType, origin: Origin) -> None:
        """Scans a function of an installed package for values set by other code; the version describes its own."""
        codes = list(_nested(function.__code__)) if origin is Origin.INSTALLED else []
        self._take_names(codes)
        names = {name for code in codes for name in code.co_names if not name.startswith("__")}
        values = {}
        for name, value in _named(names, function.__globals__, _package(function.__module__)):
            if self._take_installed(value):
                values[name] = repr(value)
        for content in cells_of(function):
            self._take_installed(content)
        if values:
            self._note(f"{function.__module__}.{function.__qualname__}", values)

    def _take_installed(self, value: Any) -> bool:
        """Follows a value in an installed package; returns whether it is plain, so that a program may have set it."""
        if isinstance(value, types.FunctionType):
            self.add_function(value)
        elif isinstance(value, type):
            self.add_class(value, is_made=True)
        elif isinstance(value, Mapping):
            # This is a registry, to which programs may add their own functions.
            for entry in list(value.values()):
                if isinstance(entry, types.FunctionType):
                    self.add_function(entry)
        return isinstance(value, _PLAIN)

    def _take_names(self, codes: list[types.CodeType]) -> set[str]:
        names: set[str] = set()
        for code in codes:
            words = [const for const in code.co_consts if isinstance(const, str) and const.isidentifier()]
            # A constant may be the name of an attribute, as in getattr(self, "scale").
            names.update(code.co_names, code.co_freevars, words)
        self._names |= names
        return names

    def _globals_of(self, function: types.FunctionType, where: str, codes: list[types.CodeType]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name in sorted({name for code in codes for name in code.co_names}):
            place = f"{where}, which reads {name}:"
            if name in function.__globals__:
                values[name] = self._global(place, function.__globals__[name])
            elif name in _UNKNOWN_VALUES and hasattr(builtins, name):
                raise NotCacheableError(f"{place} what {name}() gives cannot be known beforehand")
        for name in sorted(_imported(codes)):
            # An import is followed as it is written, and relative to the function's own package.
            for full in (name, f"{function.__globals__.get('__package__') or ''}.{name}".strip(".")):
                for known in {full, full.partition(".")[0]} & sys.modules.keys():
                    values[f"import {known}"] = self._global(f"{where}, which imports {name}:", sys.modules[known])
        return values

    def _global(self, where: str, value: Any) -> Any:
        home = _home(value)
        is_impure = _package(home) in sys.stdlib_module_names and _package(home).lstrip("_") not in _PURE
        if is_impure or home.startswith(_NOT_PURE):
            raise NotCacheableError(f"{where} {_DIFFERS}")
        if not isinstance(value, types.ModuleType):
            return self._describe(where, value)
        self._modules.setdefault(home, value)
        return ["module", home]

    def _follow_classes(self) -> bool:
        grew = False
        for cls, is_made in list(self._classes.values()):
            for base in cls.__mro__:
                grew |= self._members(base, is_made=is_made)
        return grew | self._members(torch.Tensor, is_made=False)

    def _members(self, cls: type, *, is_made: bool) -> bool:
        origin = self._module_origin(cls.__module__)
        grew = False
        for name in sorted(vars(cls), key=str):
            if not self._is_reached(name, origin, is_made=is_made) or not self._is_new("member", cls, name):
                continue
            grew = True
            self._member(f"{cls.__module__}.{cls.__qualname__}.{name}", vars(cls)[name], origin)
        return grew

    def _is_reached(self, name: str, origin: Origin, *, is_made: bool) -> bool:
        if name in _WITHOUT_MEANING or (name in _CONSTRUCTORS and not (is_made or self._makes_its_like())):
            return False
        if name in self._names or name == "forward":
            return True
        # Operators call methods that no code names.
        is_special = name.startswith("__") and name.endswith("__")
        return origin is Origin.USER and (is_special or self._uses_any_name)

    def _makes_its_like(self) -> bool:
        """Whether code may create an object of the same class as an existing one."""
        return not self._names.isdisjoint(("__class__", "type"))

    def _member(self, where: str, value: Any, origin: Origin) -> None:
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        if isinstance(value, functools.cached_property):
            value = value.func
        for one in (value.fget, value.fset) if isinstance(value, property) else (value,):
            if isinstance(one, types.FunctionType):
                self._take_function(where, one, origin)
            elif origin is Origin.USER and not isinstance(one, _SLOT_TYPES) and one is not None:
                self._note(where, self._describe(where, one))

    def _take_function(self, where: str, function: types.FunctionType, origin: Origin) -> None:
        """Follows a function in a class or module of `origin`, which a program may have replaced."""
        is_replaced = self._function_origin(function) is not origin
        if origin is Origin.USER or is_replaced:
            self._note(where, [function.__module__, function.__qualname__])
        if origin is not Origin.OWN or is_replaced:
            self.add_function(function)

    def _function_origin(self, function: types.FunctionType) -> Origin:
        name = function.__code__.co_filename
        # The methods of a dataclass have no file.
        return (
            self._module_origin(function.__globals__.get("__name__")) if name == "<string>" else self._origin_of(name)
        )

    def _module_origin(self, name: Any) -> Origin:
        """Returns the owner of a module; an unknown module counts as the program's own."""
        module = sys.modules.get(name) if isinstance(name, str) else None
        file = getattr(module, "__file__", None)
        if isinstance(file, str):
            return self._origin_of(file)
        return Origin.OWN if name in sys.builtin_module_names else Origin.USER

    def _follow_modules(self) -> bool:
        grew = False
        for forbidden in _NOT_PURE:
            # The check goes by name, because numpy imports this part of itself at its first use.
            package, _, part = forbidden.rpartition(".")
            if package in self._modules and part in self._users_names:
                raise NotCacheableError(f"the model's code reads {forbidden}: {_DIFFERS}")
        for name, module in list(self._modules.items()):
            origin = self._module_origin(name)
            everything = origin is Origin.USER and self._uses_any_name
            for used in sorted(vars(module) if everything else self._names & vars(module).keys()):
                if used.startswith("__") or not self._is_new("attribute", name, used):
                    continue
                grew = True
                self._attribute(f"{name}.{used}", vars(module)[used], origin)
        return grew

    def _attribute(self, where: str, value: Any, origin: Origin) -> None:
        if isinstance(value, types.FunctionType):
            self._take_function(where, value, origin)
        elif origin is Origin.USER:
            self._note(where, self._global(where, value))
        elif isinstance(value, types.ModuleType) and where.rpartition(".")[2] in self._users_names:
            self._global(where, value)

    def _note(self, where: str, facts: Any) -> None:
        key, number = where, 2
        while key in self._facts:
            # Several functions may have the same name, for example those of a decorator.
            key, number = f"{where} ({number})", number + 1
        self._facts[key] = facts


_SLOT_TYPES = (
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.BuiltinFunctionType,
)


class Empty(Enum):
    """Represents the content of an empty cell."""

    CELL = "empty cell"


def cells_of(function: types.FunctionType) -> list[Any]:
    """Returns the content of a function's closure."""
    contents = []
    for cell in function.__closure__ or ():
        try:
            contents.append(cell.cell_contents)
        except ValueError:
            # The enclosing function sets this name later, or never.
            contents.append(Empty.CELL)
    return contents


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields a code object and those of the functions defined in it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _nested(const)


def _digest(codes: Any) -> str:
    """Returns a digest of the instructions; it is the only difference of two functions on the same line."""
    state = hashlib.sha256()
    for code in codes:
        state.update(code.co_code)
        consts = [_const(const) for const in code.co_consts if not isinstance(const, types.CodeType)]
        state.update(repr([code.co_name, code.co_names, code.co_varnames, consts]).encode())
    return state.hexdigest()[:16]


def _home(value: Any) -> str:
    """Returns the module in which a module, class or function is defined; empty for any other value."""
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, types.BuiltinFunctionType):
        # Functions such as random.random are methods of an object.
        owner = value.__self__
        return value.__module__ or ("" if isinstance(owner, types.ModuleType) else type(owner).__module__)
    if isinstance(value, types.MethodType):
        return type(value.__self__).__module__
    return value.__module__ or "" if isinstance(value, types.FunctionType | type) else ""


def _named(names: set[str], scope: Mapping[str, Any], package: str) -> Iterator[tuple[str, Any]]:
    """Yields the values of these names in a function's globals, and in those modules among them of one package."""
    scopes, seen = [("", scope)], {id(scope)}
    for prefix, known in scopes:
        for name in sorted(names & known.keys()):
            value = known[name]
            if not isinstance(value, types.ModuleType):
                yield prefix + name, value
            elif _package(value.__name__) == package and id(vars(value)) not in seen:
                seen.add(id(vars(value)))
                scopes.append((f"{prefix}{name}.", vars(value)))


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _const(const: Any) -> str:
    return repr(sorted(map(repr, const))) if isinstance(const, frozenset) else repr(const)


def _imported(codes: list[types.CodeType]) -> set[str]:
    """Returns the modules that the code imports when it runs."""
    return {str(one.argval) for code in codes for one in dis.get_instructions(code) if one.opname == "IMPORT_NAME"}


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
    if not {"site-packages", "dist-packages"} & set(path.parts):
        return False
    inner = [folder for folder in own if {"site-packages", "dist-packages"} & set(folder.parts)]
    return not any(path.is_relative_to(folder) for folder in inner)
