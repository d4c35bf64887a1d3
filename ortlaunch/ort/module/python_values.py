"""Describes the values of Python that a model goes by, as nested lists of plain values.

These are what its modules hold beside parameters and buffers, and what the user's own functions that its forward may
reach read beside their arguments: closures, globals, defaults, attributes of classes. Names in their code are followed:
each stands for everything of this name in the function's globals, in the model's classes, and in the user's modules.
What a library keeps for itself is no state of the model.
"""

from __future__ import annotations

import collections
import contextvars
import enum
import functools
import hashlib
import logging
import pathlib
import sys
import threading
import types
import warnings
from collections.abc import Iterator, Mapping
from inspect import getmro
from typing import Any

import torch

from ortlaunch.base import own_code
from ortlaunch.ort.tracing.buffers import moved_constants

SEEN, NOT_DESCRIBED = "seen", "not described"
"""First entries of descriptions: of a value that is described elsewhere, and of one whose state is not all known."""
_SCALARS: tuple[type, ...] = (
    *(type(None), bool, int, float, complex, str, bytes, range, type(...), type(NotImplemented)),
    *(pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)
_NUMBERS_AND_TEXTS = (int, float, complex, str, bytes)
_FUNCTIONS = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.WrapperDescriptorType),
    *(types.MethodDescriptorType, functools.partial, functools._lru_cache_wrapper),
)
_READABLE: tuple[type, ...] = (
    *(object, *_NUMBERS_AND_TEXTS, dict, list, tuple, set, frozenset, slice, types.SimpleNamespace),
    *(types.MappingProxyType, collections.OrderedDict, collections.defaultdict, collections.deque),
)
"""Classes written in C whose whole state is described."""
_OF_C = (types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType)
_LEFT_OUT = {"_parameters", "_buffers", "_modules", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"}
_LEFT_OUT |= {f"_{kind}_hooks" for kind in ("backward", "backward_pre", "state_dict", "state_dict_pre")}
"""Attributes of modules that are described elsewhere, or that forward does not go by."""
# transformers stores a hash() in the first, which differs between processes. OmegaConf fills the second at a read.
_OF_LIBRARIES = {"_original_object_hash", "_flags_cache"}
_OF_ENUM = {"_value_", "_name_", "__objclass__", "_sort_order_", "_hashable_values_", "_unhashable_values_"}
_OF_CLASSES = {"__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__", "__slots__"}
_OF_CLASSES |= {"__hash__", "__abstractmethods__", "_abc_impl", "__parameters__", "__orig_bases__"}
_OF_CLASSES |= {"__static_attributes__", "__match_args__", "__dataclass_fields__", "__dataclass_params__"}
_OF_CLASSES |= {"__firstlineno__", "__slotnames__"}
_CONSTRUCTORS = {"__init__", "__new__", "__init_subclass__", "__post_init__"}


class _UnreadableError(Exception):
    """A value has no complete description."""


def described(model: torch.nn.Module) -> dict[str, Any]:
    """Describes what a model goes by: parameters and buffers without the values that a graph is given.

    Returns:
        A description of its modules, its tensors, and what its code reaches outside of them.
    """
    describe = _Describe(model)
    modules = {name: describe.module(module) for name, module in model.named_modules(remove_duplicate=False)}
    names: dict[int, str] = {}
    tensors = {}
    constants = _constants(model)
    for kind in (model.named_parameters, model.named_buffers):
        for name, tensor in kind(remove_duplicate=False):
            # Tied weights are a single input of the graph.
            tensors[name] = [*_tensor(tensor), names.setdefault(id(tensor), name)]
            if name in constants:
                tensors[name].append(_content_of(tensor))
            describe.tensors.append((f"model.{name}", tensor))
    hooks = describe.value(_global_hooks())
    return {
        "modules": modules,
        # Code may go through modules and parameters in their order.
        "order": [list(modules), list(tensors)],
        "tensors": tensors,
        "hooks of all modules": hooks,
        "reached": describe.reached(),
    }


def described_value(value: Any) -> Any:
    """Describes a value that belongs to no model."""
    return _Describe(None).value(value)


def changed(before: Any, after: Any) -> bool:
    """Whether two descriptions differ in more than values that were None.

    transformers' classifiers set such a value at the first forward: the kind of loss in their configuration.
    """
    if before == after or before == ["NoneType", "None"]:
        return False
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        return any(changed(value, after[key]) for key, value in before.items())
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return any(changed(*pair) for pair in zip(before, after, strict=True))
    return True


class _Describe:
    def __init__(self, model: torch.nn.Module | None) -> None:
        self.tensors: list[tuple[str, torch.Tensor]] = []
        """Tensors with their names, whose attributes code may read."""
        self._names: dict[int, str] = {}
        if model is not None:
            self._names = {id(module): name for name, module in model.named_modules()}
            self._names |= {id(tensor): name for name, tensor in [*model.named_buffers(), *model.named_parameters()]}
        self._seen: dict[int, tuple[int, Any]] = {}
        self._functions: dict[int, types.FunctionType] = {}
        self._classes: dict[type, bool] = {}
        """Classes, and whether code may make objects of them."""
        self._modules: dict[str, types.ModuleType] = {}
        self._words: set[str] = set()
        """Names in the user's code."""

    def module(self, module: torch.nn.Module) -> list[Any]:
        """Describes what a module of the model holds beside parameters and buffers."""
        attributes = {key: value for key, value in vars(module).items() if key not in _LEFT_OUT}
        for key, value in attributes.items():
            if key.startswith("_forward") and key.endswith("hooks"):
                # The keys of this dictionary number all hooks of the process; other dictionaries refer to them.
                flags = [sorted(vars(module).get(f"{key}_{flag}", ())) for flag in ("with_kwargs", "always_called")]
                attributes[key] = [(hook, *(number in known for known in flags)) for number, hook in value.items()]
            elif key.startswith("_forward") and "hooks" in key:
                attributes[key] = None
        return [self._class(type(module)), {key: self.value(value) for key, value in attributes.items()}]

    def value(self, value: Any) -> Any:
        """Describes a value; of one without a complete description, its type and what can be read."""
        try:
            return self._described(value)
        except Exception:
            return [NOT_DESCRIBED, type(value).__qualname__, *self._standing(value)]

    def reached(self) -> dict[str, Any]:
        """Follows names until nothing new is found; returns what is at each place outside of the modules."""
        found: dict[str, Any] = {}
        done: set[tuple[Any, ...]] = set()
        while new := [place for place in self._places() if place[0] not in done]:
            for key, where, value in new:
                done.add(key)
                number, name = 2, where
                while name in found:
                    # Several functions may have the same name, for example those of a decorator.
                    name, number = f"{where} ({number})", number + 1
                found[name] = self._read(value) if key[0] == "function" else self.value(value)
        return found

    def _places(self) -> list[tuple[tuple[Any, ...], str, Any]]:
        """Returns a key, the name and the value of what is known to be reached so far."""
        places: list[tuple[tuple[Any, ...], str, Any]] = [
            (("function", key), f"{function.__module__}.{function.__qualname__}", function)
            for key, function in self._functions.items()
        ]
        for cls, is_made in list(self._classes.items()):
            # The class of a class gives it attributes, too.
            for base in (*getmro(cls), *getmro(type(cls))):
                is_users = is_users_module(base.__module__)
                for name, member in list(vars(base).items()):
                    if self._is_member(name, is_made) if is_users else is_users_function(member):
                        for one in _parts(member):
                            where = f"{base.__module__}.{base.__qualname__}.{name}"
                            places.append((("member", base, name, id(one)), where, one))
        for module, content in self._modules.items():
            for name in self._words & vars(content).keys() | {"__getattr__"} & vars(content).keys():
                places.append((("attribute", module, name), f"{module}.{name}", vars(content)[name]))
        for where, tensor in self.tensors:
            for name in self._words & vars(tensor).keys():
                places.append((("tensor", id(tensor), name), f"{where}.{name}", vars(tensor)[name]))
        return sorted(places, key=lambda place: place[1])

    def _is_member(self, name: str, is_made: bool) -> bool:
        if name in _OF_CLASSES or (name in _CONSTRUCTORS and not is_made):
            return False
        # Operators call methods that no code names.
        return name in self._words or name == "forward" or (name.startswith("__") and name.endswith("__"))

    def _read(self, function: types.FunctionType) -> list[Any]:
        """Reads a user's function: its code, what is bound to it, and the globals that it names."""
        codes = list(_nested(function.__code__))
        names = {name for code in codes for name in code.co_names}
        texts = {text for code in codes for text in code.co_consts if isinstance(text, str) and text.isidentifier()}
        self._words |= names | texts | {name for code in codes for name in code.co_freevars}
        known = {name: function.__globals__[name] for name in sorted(names & function.__globals__.keys())}
        bound = [function.__defaults__, function.__kwdefaults__, _cells_of(function), vars(function)]
        return [_digest(codes), self.value(bound), {name: self.value(value) for name, value in known.items()}]

    def _described(self, value: Any) -> Any:
        kind = type(value)
        if kind in _SCALARS:
            return [kind.__name__, repr(value)]
        if kind is not value.__class__:
            raise _UnreadableError  # It stands for another object.
        if id(value) in self._names:
            return ["of the model", self._names[id(value)]]
        if isinstance(value, types.ModuleType):
            if is_users_module(value.__name__):
                self._modules.setdefault(value.__name__, value)
            return ["module", value.__name__]
        if isinstance(value, type):
            return self._class(value, is_made=True)
        if id(value) in self._seen:
            return [SEEN, self._seen[id(value)][0]]
        # The value is kept alive, so that its id stays unique.
        self._seen[id(value)] = (len(self._seen), value)
        if isinstance(value, logging.Logger):
            return ["logger", value.name, value.getEffectiveLevel(), value.disabled]
        if isinstance(value, torch.Tensor):
            # The tensor is not registered, so it is a constant in the graph.
            self.tensors.append(("a tensor", value))
            return [*_tensor(value), _content_of(value)]
        if isinstance(value, _FUNCTIONS):
            return self._function(value)
        if isinstance(value, torch.nn.Module):
            return self._unregistered(value)
        return self._object(value)

    def _standing(self, value: Any) -> list[Any]:
        """Describes what can be read of a value without a complete description: how far an iterator is, for example."""
        try:
            if isinstance(value, types.GeneratorType):
                frame = value.gi_frame
                parts: Any = [frame.f_lasti, list(frame.f_locals.values())] if frame else []
            elif isinstance(value, Iterator):
                with warnings.catch_warnings(action="ignore"):
                    parts = value.__reduce__()[1:]  # type: ignore[index]
            elif isinstance(value, contextvars.ContextVar):
                parts = value.get(None)
            elif isinstance(value, threading.local):
                parts = vars(value)
            else:
                return []
            return [self.value(parts)]
        except Exception:
            return []

    def _class(self, cls: type, *, is_made: bool = False) -> list[Any]:
        self._classes[cls] = is_made or self._classes.get(cls, False)
        return ["class", cls.__module__, cls.__qualname__]

    def _object(self, value: Any) -> Any:
        """Describes an object by its class, its content and its attributes."""
        kind = type(value)
        if kind.__module__.partition(".")[0] == "numpy":
            return _numpy(value)
        if any(cls not in _READABLE and _is_of_c(cls) for cls in kind.__mro__):
            raise _UnreadableError
        left_out = _OF_ENUM if isinstance(value, enum.Enum) else _OF_LIBRARIES
        attributes = {key: v for key, v in _attributes(value).items() if key not in left_out}
        return [self._class(kind), self._content(value), {key: self.value(v) for key, v in attributes.items()}]

    def _unregistered(self, module: torch.nn.Module) -> list[Any]:
        """Describes a module that a list holds, for example; its tensors, which may be many, without their values."""
        if type(module).__module__.partition(".")[0] in ("onnxruntime", "ortlaunch"):
            raise _UnreadableError  # What these hold is no state of the model.
        own = [*module._parameters.items(), *module._buffers.items()]
        tensors = {name: [*_tensor(tensor), tensor._version] for name, tensor in own if tensor is not None}
        attributes = {key: v for key, v in vars(module).items() if key not in ("_parameters", "_buffers")}
        return [self._class(type(module)), tensors, {key: self.value(v) for key, v in attributes.items()}]

    def _content(self, value: Any) -> Any:
        """Describes what an object contains besides its attributes."""
        if isinstance(value, enum.Enum):
            return [value.name, self.value(value.value)]
        for plain in _NUMBERS_AND_TEXTS:
            if isinstance(value, plain):
                return plain.__repr__(value)
        if isinstance(value, Mapping):
            # What a subclass of dict gives for its items need not be what it holds.
            pairs = list(dict.items(value) if isinstance(value, dict) else value.items())
            items = [[self.value(key), self.value(item)] for key, item in pairs]
            return [items, self.value(getattr(value, "default_factory", None))]
        if isinstance(value, set | frozenset):
            return sorted(repr(self.value(item)) for item in value)
        if isinstance(value, slice):
            value = [value.start, value.stop, value.step]
        if isinstance(value, list | tuple | collections.deque):
            return [[self.value(item) for item in value], getattr(value, "maxlen", None)]
        return []

    def _function(self, value: Any) -> Any:
        if isinstance(value, functools.partial):
            return ["partial", self.value(value.func), self.value([value.args, value.keywords, vars(value)])]
        if isinstance(value, functools._lru_cache_wrapper):
            return ["remembering", self.value(vars(value))]
        if isinstance(value, types.MethodType):
            return ["method", self.value(value.__func__), self.value(value.__self__)]
        if isinstance(value, types.FunctionType):
            if is_users_function(value):
                self._functions.setdefault(id(value), value)
            return ["function", value.__module__, value.__qualname__]
        owner = getattr(value, "__self__", None)
        name = ["builtin", str(getattr(value, "__module__", None)), value.__qualname__]
        # It may be a method of an object, such as ``{"a": 1}.get``.
        is_of_object = owner is not None and not isinstance(owner, types.ModuleType) and not _is_of_torch(owner)
        return [*name, self.value(owner)] if is_of_object else name


def is_users_function(function: Any) -> bool:
    """Whether a value is a function of the user's own files."""
    if not isinstance(function, types.FunctionType):
        return False
    name = function.__code__.co_filename
    # The methods of a dataclass have no file.
    return is_users_module(function.__globals__.get("__name__")) if name.startswith("<") else own_code.is_users(name)


def is_users_module(name: object) -> bool:
    """Whether a module is one of the user's own files, or the program itself."""
    module = sys.modules.get(name) if isinstance(name, str) else None
    file = getattr(module, "__file__", None)
    return own_code.is_users(file) if isinstance(file, str) else name == "__main__"


def _parts(member: Any) -> list[Any]:
    """The functions of a member of a class, or the member itself where it is none."""
    if isinstance(member, staticmethod | classmethod):
        return [member.__func__]
    if isinstance(member, functools.cached_property):
        return [member.func]
    if isinstance(member, property):
        return [one for one in (member.fget, member.fset) if one is not None]
    slots = (types.MemberDescriptorType, types.GetSetDescriptorType)
    return [] if member is None or isinstance(member, slots) else [member]


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields a code object and those of the functions defined in it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _nested(const)


def _digest(codes: list[types.CodeType]) -> str:
    """A digest of the instructions; it is the only difference of two functions on the same line."""
    state = hashlib.sha256()
    for code in codes:
        consts = [
            repr(sorted(map(repr, one))) if isinstance(one, frozenset) else repr(one)
            for one in code.co_consts
            if not isinstance(one, types.CodeType)
        ]
        state.update(code.co_code + repr([code.co_name, code.co_names, code.co_varnames, consts]).encode())
    return state.hexdigest()[:16]


def _cells_of(function: types.FunctionType) -> list[Any]:
    contents = []
    for cell in function.__closure__ or ():
        try:
            contents.append(cell.cell_contents)
        except ValueError:
            contents.append("empty cell")  # The enclosing function sets this name later, or never.
    return contents


def _tensor(tensor: torch.Tensor) -> list[Any]:
    layout = list(tensor.stride()) if tensor.layout is torch.strided else str(tensor.layout)
    return ["tensor", str(tensor.dtype), list(tensor.shape), layout, tensor.device.type, tensor.requires_grad]


def _content_of(tensor: torch.Tensor) -> str:
    """A digest of a tensor's values; empty where they cannot be read."""
    try:
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return hashlib.sha256(plain.view(torch.uint8).numpy().tobytes()).hexdigest()
    except (RuntimeError, NotImplementedError, TypeError):
        return ""


def _constants(model: torch.nn.Module) -> set[str]:
    """Returns the tensors whose values a graph keeps: those that are not saved, unless a graph has moved them."""
    # torch's exporter takes for inputs what `state_dict` writes, whatever a model's own leaves out of its result.
    saved: dict[str, Any] = {}
    model.state_dict(destination=saved, prefix="", keep_vars=True)
    kinds = (model.named_parameters, model.named_buffers)
    names = {name for kind in kinds for name, _ in kind(remove_duplicate=False)}
    return names.difference(saved, moved_constants(model))


def _global_hooks() -> list[Any]:
    """Returns hooks that torch calls at the forward of every module."""
    hooks = torch.nn.modules.module
    found: list[Any] = []
    for name in ("_global_forward_pre_hooks", "_global_forward_hooks"):
        flags = getattr(hooks, f"{name}_with_kwargs", {})
        found += [(name, hook, number in flags) for number, hook in getattr(hooks, name).items()]
    return found


def _numpy(value: Any) -> list[Any]:
    import numpy

    if isinstance(value, numpy.dtype):
        return ["numpy", repr(value)]
    if not (type(value) is numpy.ndarray or isinstance(value, numpy.generic)) or value.dtype.hasobject:
        raise _UnreadableError
    return ["numpy", str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]


def _is_of_c(cls: type) -> bool:
    """Whether a class is written in C, so that its objects may have state that no attribute shows."""
    for value in vars(cls).values():
        if isinstance(value, _OF_C) and value.__objclass__ is cls:
            return True
        if isinstance(value, types.BuiltinFunctionType) and value.__self__ is cls:
            return True
    return False


def _is_of_torch(owner: Any) -> bool:
    """Whether an object belongs to torch and has no state, such as the one that holds ``torch.relu``."""
    kind = owner if isinstance(owner, type) else type(owner)
    return kind.__module__.startswith("torch.") and not isinstance(owner, torch.Tensor | torch.Generator)


def _attributes(value: Any) -> dict[str, Any]:
    slots = [name for cls in type(value).__mro__ for name in _slots(cls) if hasattr(value, name)]
    return {name: getattr(value, name) for name in slots} | dict(getattr(value, "__dict__", {}))


def _slots(cls: type) -> list[str]:
    """Returns the names of the slots of one class; Python prefixes private ones with the class name."""
    slots = vars(cls).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else slots
    private = f"_{cls.__name__.lstrip('_')}"
    return [private + name if name.startswith("__") and not name.endswith("__") else name for name in names]
