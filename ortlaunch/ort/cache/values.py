"""Describes values as nested lists of plain values, or refuses those whose state cannot be read completely."""

from __future__ import annotations

import collections
import contextvars
import enum
import functools
import hashlib
import importlib.metadata
import logging
import pathlib
import sys
import threading
import types
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ortlaunch.ort.cache import files
from ortlaunch.ort.cache.bytecode import cells_of, is_unordered
from ortlaunch.ort.cache.files import NotCacheableError
from ortlaunch.ort.cache.reachable_code import ReachableCode
from ortlaunch.ort.cache.standard_library import gives_the_same

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
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_READABLE: tuple[type, ...] = (
    *(object, *_NUMBERS_AND_TEXTS, dict, list, tuple, set, frozenset, slice, types.SimpleNamespace),
    *(types.MappingProxyType, collections.OrderedDict, collections.defaultdict, collections.deque),
)
"""Classes written in C whose whole state is described."""
_FIELD_OF_TUPLE = type(collections.namedtuple("Example", "field").field)  # type: ignore[attr-defined]
_OF_C = (types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType)
# transformers stores a hash() in the first, which differs between processes. OmegaConf fills the second at a read.
_NOT_ATTRIBUTES_OF_OBJECTS = {"_original_object_hash", "_flags_cache"}
_OF_ENUM = {"_value_", "_name_", "__objclass__", "_sort_order_", "_hashable_values_", "_unhashable_values_"}


class Describe:
    """Converts values to nested lists of plain values, and collects the files with their code."""

    def __init__(
        self, model: torch.nn.Module | None, *, is_exported: bool = False, must_be_complete: bool = True
    ) -> None:
        """
        Args:
            model: its modules, parameters and buffers are described by their names; None if there is no model.
            is_exported: whether the model was exported since the first description, so that it was called.
            must_be_complete: whether a value without a complete description is refused. Else its type stands for it.
        """
        self._may_remember = is_exported
        self._must_be_complete = must_be_complete
        self.names: dict[int, str] = {}
        if model is not None:
            self.names = {id(module): name for name, module in model.named_modules()}
            self.names |= {id(tensor): name for name, tensor in [*model.named_buffers(), *model.named_parameters()]}
        self._seen: dict[int, tuple[int, Any]] = {}
        self._files: set[Path] = set()
        self._packages: set[str] = set()
        self.reached = ReachableCode(self)

    def value(self, where: str, value: Any) -> Any:
        """Describes a value.

        Raises:
            NotCacheableError: it has no complete description, which must be complete; `where` names it.
        """
        try:
            return self._described(where, value)
        except NotCacheableError as error:
            self.refuse(str(error))
        except Exception as error:
            self.refuse(f"{where} cannot be read: {type(error).__name__}")
        return [NOT_DESCRIBED, type(value).__qualname__, *self._standing(where, value)]

    def _standing(self, where: str, value: Any) -> list[Any]:
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
            return [self.value(where, parts)]
        except Exception:
            return []

    def refuse(self, reason: str) -> None:
        """Raises NotCacheableError if the description must be complete; else the caller leaves something out."""
        if self._must_be_complete:
            raise NotCacheableError(reason)

    def _described(self, where: str, value: Any) -> Any:
        kind = type(value)
        if kind in _SCALARS:
            if issubclass(kind, pathlib.PurePath):
                self.reached.has_paths = True
            return [kind.__name__, repr(value)]
        if kind is not value.__class__:
            raise NotCacheableError(f"{where} is a {kind.__qualname__}, which stands for another object")
        if id(value) in self.names:
            return ["of the model", self.names[id(value)]]
        if isinstance(value, torch.nn.Module) and (self._must_be_complete or _is_wrapper(kind)):
            raise NotCacheableError(f"{where} holds a module that is not registered")
        if isinstance(value, types.ModuleType):
            return self.reached.module(where, value)
        if isinstance(value, type):
            return self.class_(value, is_made=True)
        if id(value) in self._seen:
            return [SEEN, self._seen[id(value)][0]]
        # The value is kept alive, so that its id stays unique.
        self._seen[id(value)] = (len(self._seen), value)
        if isinstance(value, logging.Logger):
            return ["logger", value.name, value.getEffectiveLevel(), value.disabled]
        if isinstance(value, torch.Tensor):
            # The tensor is not registered, so it is a constant in the graph.
            self.reached.add_tensor(where, value)
            return [*tensor_facts(value), tensor_values(where, value)]
        if isinstance(value, _FUNCTIONS):
            return self._function(where, value)
        if isinstance(value, torch.nn.Module):
            return self._unregistered(where, value)
        return self._object(where, value)

    def tensor_values(self, where: str, tensor: torch.Tensor) -> str:
        """Returns a digest of a tensor's values; nothing where they cannot be read and need not be.

        Raises:
            NotCacheableError: they cannot be read, and the description must be complete.
        """
        try:
            return tensor_values(where, tensor)
        except NotCacheableError as error:
            self.refuse(str(error))
        return ""

    def code_digests(self) -> dict[str, str]:
        """Returns a digest of each file with described code; torch's own code is identified by its version."""
        return {str(path): files.digest(path) for path in sorted(self._files)}

    def package_versions(self) -> dict[str, str]:
        """Returns the versions of the installed packages with that code; they stand for the packages' other files."""
        versions: dict[str, str] = {}
        for package in sorted(self._packages):
            # Most packages have the name of what they install. The list of all packages takes a while to build.
            if (version := files.version(package)) is not None:
                versions[package] = version
                continue
            names = files.distributions().get(package, [])
            versions |= {name: importlib.metadata.version(name) for name in names}
        return versions

    def class_(self, cls: type, *, is_made: bool) -> list[Any]:
        """Describes a class by its name, and adds its code.

        Args:
            cls: the class.
            is_made: whether code may create objects of it.
        """
        self.reached.add_class(cls, is_made=is_made)
        if id(cls) not in self._seen:
            self._seen[id(cls)] = (len(self._seen), cls)
            for base in cls.__mro__:
                self._base(base)
        return ["class", cls.__module__, cls.__qualname__]

    def _object(self, where: str, value: Any) -> Any:
        """Describes an object by its class, its content and its attributes."""
        kind = type(value)
        if kind is _FIELD_OF_TUPLE:
            return ["field", repr(value)]
        if kind.__module__.partition(".")[0] == "numpy":
            return _numpy(where, value)
        for cls in kind.__mro__:
            if cls not in _READABLE and _is_of_c(cls):
                raise NotCacheableError(f"{where} is a {kind.__qualname__}")
        if files.is_stdlib_module(kind.__module__) and not gives_the_same(kind.__module__):
            raise NotCacheableError(
                f"{where} is a {kind.__qualname__} of {kind.__module__}, which can change by itself"
            )
        left_out = _OF_ENUM if isinstance(value, enum.Enum) else _NOT_ATTRIBUTES_OF_OBJECTS
        attributes = {key: v for key, v in _attributes(value).items() if key not in left_out}
        return [
            self.class_(kind, is_made=False),
            self._content(where, value),
            {key: self.value(f"{where}.{key}", v) for key, v in attributes.items()},
        ]

    def _unregistered(self, where: str, module: torch.nn.Module) -> list[Any]:
        """Describes a module that a list holds, for example; its tensors, which may be many, without their values."""
        own = [*module._parameters.items(), *module._buffers.items()]
        tensors = {name: [*tensor_facts(tensor), tensor._version] for name, tensor in own if tensor is not None}
        attributes = {key: v for key, v in vars(module).items() if key not in ("_parameters", "_buffers")}
        return [
            self.class_(type(module), is_made=False),
            tensors,
            {key: self.value(f"{where}.{key}", v) for key, v in attributes.items()},
        ]

    def _content(self, where: str, value: Any) -> Any:
        """Describes what an object contains besides its attributes."""
        if isinstance(value, enum.Enum):
            return [value.name, self.value(f"{where}.value", value.value)]
        for plain in _NUMBERS_AND_TEXTS:
            if isinstance(value, plain):
                return plain.__repr__(value)
        if isinstance(value, Mapping):
            items = [[self.value(where, key), self.value(f"{where}[{key!r}]", v)] for key, v in _items(where, value)]
            return [items, self.value(where, getattr(value, "default_factory", None))]
        if isinstance(value, set | frozenset):
            if is_unordered(value):
                self.reached.unordered.append(where)
            return sorted(repr(self.value(where, item)) for item in value)
        if isinstance(value, slice):
            value = [value.start, value.stop, value.step]
        if isinstance(value, list | tuple | collections.deque):
            parts = [self.value(f"{where}[{index}]", item) for index, item in enumerate(value)]
            return [parts, getattr(value, "maxlen", None)] if isinstance(value, collections.deque) else parts
        return []

    def _function(self, where: str, value: Any) -> Any:
        if isinstance(value, functools.partial):
            parts = [value.args, value.keywords, vars(value)]
            return ["partial", self.value(where, value.func), self.value(where, parts)]
        if isinstance(value, functools._lru_cache_wrapper):
            if value.cache_info().currsize and not self._may_remember:
                raise NotCacheableError(f"{where} is a function that remembers results of calls before the export")
            return ["remembering", self.value(where, vars(value))]
        if isinstance(value, types.MethodType):
            return ["method", self.value(where, value.__func__), self.value(where, value.__self__)]
        code = getattr(value, "__code__", None)
        if code is None:
            return self._builtin(where, value)
        if not code.co_filename.startswith("<"):
            self._add_file(where, code.co_filename)
            self.add_package(value.__module__)
        # Code without a file, such as the methods of a dataclass, is identified by its instructions.
        self.reached.add_function(value)
        if not self._must_be_complete and files.function_origin(value) is not files.Origin.USER:
            # What a package's function keeps for itself is no state of the model.
            return ["function", value.__module__, value.__qualname__]
        # torch.compile marks functions when they are first called.
        attributes = {key: v for key, v in vars(value).items() if not key.startswith("__dynamo")}
        parts = [value.__defaults__ or (), value.__kwdefaults__ or {}, cells_of(value), attributes]
        return ["function", value.__module__, value.__qualname__, code.co_firstlineno, self.value(where, parts)]

    def _builtin(self, where: str, value: Any) -> Any:
        owner = getattr(value, "__self__", None)
        if owner is None or isinstance(owner, types.ModuleType) or _is_of_torch(owner):
            return ["builtin", str(getattr(value, "__module__", None)), value.__qualname__]
        # It is a method of an object, such as ``{"a": 1}.get``.
        return ["builtin of", value.__qualname__, self.value(where, owner)]

    def _base(self, cls: type) -> None:
        """Adds the file with the code of one class."""
        source = sys.modules.get(cls.__module__)
        where = f"{cls.__module__}.{cls.__qualname__}"
        if source is None:
            self.refuse(f"the module of {where} is not imported")
            return
        if getattr(source, "__file__", None) is None:
            if cls.__module__ not in sys.builtin_module_names:
                self.refuse(f"{where} has no file")
            return
        # Our own code is described as a whole.
        if source.__name__.partition(".")[0] == "ortlaunch":
            return
        if self._add_file(where, str(source.__file__)):
            self.add_package(cls.__module__)

    def add_package(self, module: str | None) -> None:
        """Adds the version of the package to which a module belongs, if it is an installed one."""
        if files.module_origin(module) is files.Origin.INSTALLED:
            self._packages.add(str(module).partition(".")[0])

    def _add_file(self, where: str, name: str) -> bool:
        """Adds a file; returns whether it is identified by its content."""
        path = Path(name)
        is_torch = path.is_relative_to(files.torch_folder())
        if is_torch or files.is_stdlib(path) or name.startswith("<frozen") or path.suffix == ".so":
            return False
        if not path.is_file():
            self.refuse(f"the code of {where} is in no file ({name})")
            return False
        self._files.add(path)
        return True


def tensor_facts(tensor: torch.Tensor) -> list[Any]:
    """Describes a tensor without its values."""
    layout = list(tensor.stride()) if tensor.layout is torch.strided else str(tensor.layout)
    return ["tensor", str(tensor.dtype), list(tensor.shape), layout, tensor.device.type, tensor.requires_grad]


def tensor_values(where: str, tensor: torch.Tensor) -> str:
    """Returns a digest of a tensor's values.

    Raises:
        NotCacheableError: they cannot be read; `where` names the tensor.
    """
    if type(tensor) not in _TENSORS or tensor.layout is not torch.strided or tensor.is_quantized:
        raise NotCacheableError(f"{where} is a tensor of a special kind ({type(tensor).__qualname__}, {tensor.layout})")
    try:
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return hashlib.sha256(plain.view(torch.uint8).numpy().tobytes()).hexdigest()
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise NotCacheableError(f"{where} is a tensor whose values cannot be read ({error})") from error


def _numpy(where: str, value: Any) -> list[Any]:
    import numpy

    if isinstance(value, numpy.dtype):
        return ["numpy", repr(value)]
    if not (type(value) is numpy.ndarray or isinstance(value, numpy.generic)) or value.dtype.hasobject:
        raise NotCacheableError(f"{where} is a {type(value).__qualname__} of numpy whose content cannot be read")
    return ["numpy", str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]


def _items(where: str, value: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    # What a subclass of dict gives for its items need not be what it holds.
    if isinstance(value, dict):
        return list(dict.items(value))
    try:
        return list(value.items())
    except Exception as error:
        # OmegaConf, for example, raises an error of its own for a value that is missing.
        raise NotCacheableError(f"{where} cannot be read: {error}") from error


def _is_of_c(cls: type) -> bool:
    """Whether a class is written in C, so that its objects may have state that no attribute shows."""
    for value in vars(cls).values():
        if isinstance(value, _OF_C) and value.__objclass__ is cls:
            return True
        if isinstance(value, types.BuiltinFunctionType) and value.__self__ is cls:
            return True
    return False


def _is_wrapper(kind: type) -> bool:
    """Whether a class of modules is ORTModule or one of ours: what they hold is no state of the model."""
    return kind.__module__.partition(".")[0] in ("onnxruntime", "ortlaunch")


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
