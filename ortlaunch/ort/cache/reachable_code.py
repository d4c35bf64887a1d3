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
import functools
import importlib.util
import re
import sys
import types
from collections.abc import Iterator, Mapping
from inspect import getmro
from typing import Any, Protocol

import torch

from ortlaunch.ort.cache import bytecode, files
from ortlaunch.ort.cache.bytecode import cells_of
from ortlaunch.ort.cache.files import NotCacheableError, Origin, function_origin, module_origin
from ortlaunch.ort.cache.outline import outline
from ortlaunch.ort.cache.standard_library import DIFFERS, FILES, NOT_PURE, UNKNOWN_BUILTINS, UNKNOWN_NAMES, is_impure

_BY_ANY_NAME = frozenset(("getattr", "setattr", "hasattr", "delattr", "__dict__", "__getattribute__", "attrgetter"))
"""Names with which code reads attributes whose names are computed at run time."""
_WITHOUT_MEANING = frozenset(
    ("__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__", "__slots__", "__hash__")
) | {"__abstractmethods__", "_abc_impl", "__parameters__", "__orig_bases__", "__static_attributes__", "__match_args__"}
_WITHOUT_MEANING |= {"__dataclass_fields__", "__dataclass_params__", "__firstlineno__", "__slotnames__"}
"""Members that matter only where code names them."""
_CONSTRUCTORS = frozenset(("__init__", "__new__", "__init_subclass__", "__post_init__"))
_ALWAYS = _CONSTRUCTORS | {"forward"}
_OF_FUNCTIONS = frozenset(("backward", "setup_context", "vjp", "jvp", "vmap"))
"""Methods of an autograd.Function that torch calls."""


class Describer(Protocol):
    """Describes values; it may add functions and classes to the code that is reached."""

    def value(self, where: str, value: Any) -> Any:
        """Describes a value as nested lists of plain values."""

    def add_package(self, module: str | None) -> None:
        """Adds the version of the package to which a module belongs."""

    def refuse(self, reason: str) -> None:
        """Raises NotCacheableError if the description must be complete; else the caller leaves something out."""


class ReachableCode:
    """Collects functions, classes and modules, and follows the names in them."""

    def __init__(self, describe: Describer) -> None:
        self.has_paths = False
        """Whether a path was described, whose methods look at files."""
        self.unordered: list[str] = []
        """Places of the sets whose order may differ between processes."""
        self.codes: set[types.CodeType] = set()
        """All of the user's code that is reached."""
        self._describe = describe
        self._names: set[str] = set()
        self._users_names: set[str] = set()
        self._uses_any_name = False
        self._functions: dict[int, types.FunctionType] = {}
        self._classes: dict[int, tuple[type, bool]] = {}
        self._modules: dict[str, types.ModuleType] = {}
        self._tensors: list[tuple[str, torch.Tensor]] = []
        self._facts: dict[str, Any] = {}
        self._of_packages: dict[str, Any] = {}
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

    def add_tensor(self, where: str, tensor: torch.Tensor) -> None:
        """Adds a tensor, whose Python attributes code may read."""
        self._tensors.append((where, tensor))

    def module(self, where: str, module: types.ModuleType) -> list[str]:
        """Adds a module that is reached, and describes it by its name.

        Raises:
            NotCacheableError: what the module gives can differ between runs.
        """
        name = module.__name__
        if is_impure(name):
            raise NotCacheableError(f"{where} {DIFFERS}")
        if self._modules.setdefault(name, module) is not module:
            raise NotCacheableError(f"{where} is one of several modules with the name {name}")
        self._describe.add_package(name)
        return ["module", name]

    def facts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Follows names until nothing new is found.

        Returns:
            For each place in the user's files, the code of its functions and the values that they read; and the values
            that packages, torch and Python hold there, which a program may have set.

        Raises:
            NotCacheableError: the user's code reads a value that cannot be described.
        """
        grew = True
        while grew:
            # All of these run each time, because each one finds names that the others follow.
            grew = self._follow_functions() | self._follow_classes()
            grew |= self._follow_modules() | self._follow_tensors()
        self._check_order()
        if self.has_paths and not FILES.isdisjoint(self._users_names):
            names = ", ".join(sorted(FILES & self._users_names))
            self._describe.refuse(f"the model's code may look at a file through a path ({names})")
        return self._facts, self._of_packages

    def _check_order(self) -> None:
        if not sys.flags.hash_randomization:
            return
        for where in self.unordered:
            # The first word is the model or a module.
            words = re.findall(r"\w+", where)[1:]
            if where.startswith("the function") or not self._used.isdisjoint(words):
                self._describe.refuse(f"the order of the set {where} can differ from process to process")

    @functools.cached_property
    def _used(self) -> set[str]:
        return bytecode.untested_names(self.codes)

    def _is_new(self, *key: Any) -> bool:
        """Whether something was not looked at before; from now on it was."""
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
        origin = function_origin(function)
        # A wrapper of torch around another function, such as ``torch.no_grad()``, has the module of that function.
        home = module_origin(function.__module__) if origin is Origin.OWN else origin
        if home is Origin.USER:
            self._read_users(function, origin)
        elif home is Origin.INSTALLED:
            self._describe.add_package(function.__module__)
            self._scan(function, origin)

    def _read_users(self, function: types.FunctionType, origin: Origin) -> None:
        """Reads a user's function: its code, its bound values, and the globals that it names."""
        where = f"{function.__module__}.{function.__qualname__}"
        bound = [function.__defaults__ or (), function.__kwdefaults__ or {}, cells_of(function), vars(function)]
        facts = [self._describe.value(f"the function {where}", bound)]
        if origin is Origin.USER:
            codes = list(bytecode.nested(function.__code__))
            self.codes.update(codes)
            if sys.flags.hash_randomization and bytecode.uses_order_of_sets(codes):
                self._describe.refuse(f"{where} makes a set, whose order can differ from process to process")
            names = bytecode.names(codes, in_texts=True)
            if unknown := UNKNOWN_NAMES & names:
                self._describe.refuse(f"{where} reads {min(unknown)}, and what that gives cannot be known beforehand")
            self._names |= names
            self._users_names |= names
            self._uses_any_name |= any(not _BY_ANY_NAME.isdisjoint(code.co_names) for code in codes)
            facts += [bytecode.digest(codes), self._globals_of(function, where, codes)]
        self._note(where, facts)

    def _scan(self, function: types.FunctionType, origin: Origin) -> None:
        """Scans a function of an installed package for values set by other code; the version describes its own."""
        codes = list(bytecode.nested(function.__code__)) if origin is Origin.INSTALLED else []
        self._names |= bytecode.names(codes, in_texts=False)
        names = {name for code in codes for name in code.co_names if not name.startswith("__")}
        where = f"{function.__module__}.{function.__qualname__}"
        values = {
            name: self._outline(f"{where}, which reads {name}:", value)
            for name, value in _named(names, function.__globals__, _package(function.__module__))
        }
        bound = [function.__defaults__ or (), function.__kwdefaults__ or {}, cells_of(function)]
        self._note(where, [values, self._outline(f"the function {where}", bound)], origin)

    def _outline(self, where: str, value: Any) -> Any:
        """Describes a value of an installed package, where only what a program has set is not yet in the key."""
        try:
            return outline(where, value, self)
        except NotCacheableError as error:
            self._describe.refuse(str(error))
        except Exception as error:
            # Objects of packages may raise anything when an attribute is read, such as pydantic's stand-ins.
            self._describe.refuse(f"{where} cannot be read: {type(error).__name__}")
        return "not described"

    def describe(self, where: str, value: Any) -> Any:
        """Describes a value that the user's program made."""
        return self._describe.value(where, value)

    def _globals_of(self, function: types.FunctionType, where: str, codes: list[types.CodeType]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        known_builtins = vars(builtins)
        for name in sorted({name for code in codes for name in code.co_names}):
            place = f"{where}, which reads {name}:"
            if name in function.__globals__:
                values[name] = self._global(place, function.__globals__[name])
            elif name in UNKNOWN_BUILTINS and name in known_builtins:
                self._describe.refuse(f"{place} what {name}() gives cannot be known beforehand")
            elif name in known_builtins and not _is_pythons(name, known_builtins[name]):
                values[name] = self._global(place, known_builtins[name])
        for name in sorted(bytecode.imports(codes)):
            values[f"import {name}"] = self._import(where, name, function.__globals__.get("__package__") or "")
        return values

    def _import(self, where: str, name: str, package: str) -> Any:
        """Follows an import as it is written."""
        place = f"{where}, which imports {name}:"
        full = importlib.util.resolve_name(name, package) if name.startswith(".") else name
        if full in sys.modules:
            return [self._global(place, sys.modules[known]) for known in sorted({full, _package(full)})]
        if is_impure(full):
            self._describe.refuse(f"{place} {DIFFERS}")
            return "not described"
        # A package is searched for without importing it.
        spec = importlib.util.find_spec(_package(full))
        if spec is None or _is_users(spec.origin):
            self._describe.refuse(f"{place} it is not imported yet")
            return "not described"
        self._describe.add_package(_package(full))
        return "installed"

    def _global(self, where: str, value: Any) -> Any:
        if is_impure(_home(value)):
            self._describe.refuse(f"{where} {DIFFERS}")
            return "not described"
        return self._describe.value(where, value)

    def _follow_classes(self) -> bool:
        # The class of a class gives it attributes, too. Most classes have the same bases, which are looked at once.
        bases = {
            (id(base), is_made): base
            for cls, is_made in self._classes.values()
            for base in (*getmro(cls), *getmro(type(cls)))
        }
        grew = False
        for (_, is_made), base in bases.items():
            grew |= self._members(base, is_made=is_made)
        return grew | self._members(torch.Tensor, is_made=False)

    def _members(self, cls: type, *, is_made: bool) -> bool:
        origin = module_origin(cls.__module__)
        grew = False
        # Most members of the many classes of packages are named nowhere.
        known = vars(cls).keys()
        likely = known if origin is Origin.USER else known & (self._names | _ALWAYS)
        for name in sorted(likely, key=str):
            if not self._is_reached(cls, name, origin, is_made=is_made) or not self._is_new("member", cls, name):
                continue
            grew = True
            self._member(f"{cls.__module__}.{cls.__qualname__}.{name}", vars(cls)[name], origin)
        return grew

    def _is_reached(self, cls: type, name: str, origin: Origin, *, is_made: bool) -> bool:
        if name in _WITHOUT_MEANING:
            return origin is Origin.USER and self._is_named(name)
        if name in _CONSTRUCTORS and not (is_made or self._makes_its_like()):
            return False
        if name in self._names or name == "forward":
            return True
        if name in _OF_FUNCTIONS and issubclass(cls, torch.autograd.Function):
            return origin is Origin.USER
        # Operators call methods that no code names.
        is_special = name.startswith("__") and name.endswith("__")
        return origin is Origin.USER and (is_special or self._uses_any_name)

    def _is_named(self, name: str) -> bool:
        """Whether the user's code reads a member that has no meaning otherwise."""
        if name == "__dataclass_fields__" and "fields" in self._users_names:
            return True
        # The positions in ``case Point(0)`` have the names that are stored here.
        return name == "__match_args__" or name in self._users_names

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
            elif origin is not Origin.USER:
                self._note(where, self._outline(where, one), origin)
            elif not isinstance(one, _SLOT_TYPES) and one is not None:
                self._note(where, self._describe.value(where, one))

    def _take_function(self, where: str, function: types.FunctionType, origin: Origin) -> None:
        """Follows a function in a class or module of `origin`, which a program may have replaced."""
        self._note(where, [function.__module__, function.__qualname__], origin)
        if origin is not Origin.OWN or function_origin(function) is not origin:
            self.add_function(function)

    def _follow_modules(self) -> bool:
        grew = False
        for forbidden in NOT_PURE:
            # The check goes by name, because numpy imports this part of itself at its first use.
            package, _, part = forbidden.rpartition(".")
            if package in self._modules and part in self._users_names:
                self._describe.refuse(f"the model's code reads {forbidden}: {DIFFERS}")
        for name, module in list(self._modules.items()):
            origin = module_origin(name)
            everything = origin is Origin.USER and self._uses_any_name
            if type(module) is not types.ModuleType and origin is Origin.USER:
                self.add_class(type(module), is_made=False)
            names = self._names | ({"__getattr__"} if origin is Origin.USER else set())
            for used in sorted(vars(module) if everything else names & vars(module).keys()):
                if (used.startswith("__") and used != "__getattr__") or not self._is_new("attribute", name, used):
                    continue
                grew = True
                self._attribute(f"{name}.{used}", vars(module)[used], origin)
        return grew

    def _attribute(self, where: str, value: Any, origin: Origin) -> None:
        if isinstance(value, types.FunctionType):
            self._take_function(where, value, origin)
        elif origin is Origin.USER:
            self._note(where, self._global(where, value))
        elif not isinstance(value, types.ModuleType):
            self._note(where, self._outline(where, value), origin)
        elif where.rpartition(".")[2] in self._users_names:
            self._global(where, value)

    def _follow_tensors(self) -> bool:
        grew = False
        for where, tensor in list(self._tensors):
            for name in sorted(self._names & vars(tensor).keys()):
                if self._is_new("attribute of a tensor", id(tensor), name):
                    grew = True
                    place = f"{where}.{name}"
                    self._note(place, self._describe.value(place, vars(tensor)[name]))
        return grew

    def _note(self, where: str, facts: Any, origin: Origin = Origin.USER) -> None:
        """Notes what is at a place; `origin` is that of the code which holds it."""
        noted = self._facts if origin is Origin.USER else self._of_packages
        key, number = where, 2
        while key in noted:
            # Several functions may have the same name, for example those of a decorator.
            key, number = f"{where} ({number})", number + 1
        noted[key] = facts


_SLOT_TYPES = (
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.BuiltinFunctionType,
)


def _is_users(file: str | None) -> bool:
    """Whether a file, as the import system names it, is the program's own."""
    return file not in (None, "built-in", "frozen") and files.origin(str(file)) is Origin.USER


def _is_pythons(name: str, value: Any) -> bool:
    """Whether a builtin is the one that Python has under this name."""
    if value is None or isinstance(value, bool) or value is Ellipsis or value is NotImplemented:
        return True
    return getattr(value, "__module__", None) in ("builtins", "_sitebuiltins", "io", "_io") and name in (
        getattr(value, "__name__", name),
        "IOError",
        "EnvironmentError",
    )


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
