"""Describes values in installed packages and in torch, as far as a program may have set them to something else."""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from ortlaunch.ort.cache.files import Origin, module_origin

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_DEEPEST = 4
REGISTRY = "registry"
"""Begins the description of a package's dictionary."""


class Reached(Protocol):
    """What takes the functions and classes that an outline finds."""

    def add_function(self, function: types.FunctionType) -> None:
        """Adds a function that is reached."""

    def add_class(self, cls: type, *, is_made: bool) -> None:
        """Adds a class whose objects are used."""

    def describe(self, where: str, value: Any) -> Any:
        """Describes a value that the user's program made."""


def outline(where: str, value: Any, reached: Reached, depth: int = 0) -> Any:
    """Describes a value by its name or content; a package's object is described by its class alone.

    Functions and classes are added to what is reached. What the user's program made is described completely.

    Raises:
        NotCacheableError: the user's program has set this value, and it cannot be described.
    """
    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, types.FunctionType):
        reached.add_function(value)
        return [value.__module__, value.__qualname__]
    if isinstance(value, type):
        reached.add_class(value, is_made=True)
        return [value.__module__, value.__qualname__]
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, functools.partial | types.MethodType) or _is_users(type(value)):
        return reached.describe(where, value)
    if type(value) is torch.Tensor and value.device.type == "cpu" and value.layout is torch.strided:
        return [str(value.dtype), hashlib.sha256(repr(value.tolist()).encode()).hexdigest()]
    if depth < _DEEPEST:
        # Subclasses are read as what they hold, because some import modules when they are asked.
        if isinstance(value, dict):
            return [REGISTRY, {_key(k): outline(where, v, reached, depth + 1) for k, v in list(dict.items(value))}]
        if isinstance(value, Mapping):
            # This is a registry, to which programs may add their own functions.
            return [REGISTRY, {_key(k): outline(where, v, reached, depth + 1) for k, v in list(value.items())}]
        if isinstance(value, list | tuple):
            return [outline(where, item, reached, depth + 1) for item in value]
        if isinstance(value, set | frozenset):
            return sorted(_key(item) for item in value)
    return [type(value).__module__, type(value).__qualname__, getattr(value, "__qualname__", "")]


def _key(value: Any) -> str:
    return repr(value) if type(value) in _PLAIN else f"{type(value).__qualname__} {getattr(value, '__qualname__', '')}"


def _is_users(cls: type) -> bool:
    # Cython puts the classes of its functions into modules without a file.
    return not cls.__module__.startswith("_cython_") and module_origin(cls.__module__) is Origin.USER
