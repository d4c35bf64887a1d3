"""Describes the state of torch and of this environment that an export depends on, and what a program has replaced."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import ortlaunch
from ortlaunch.ort.cache import files
from ortlaunch.ort.cache.files import NotCacheableError, Origin

_OPSET = 17
"""The version of the ONNX operators with which ORTModule exports."""
_PACKAGES = ("torch", "onnx", "onnxruntime-training", "onnxruntime-training-cpu", "transformers", "numpy")
_SWITCHES = (
    *("torch.get_default_dtype", "torch.get_float32_matmul_precision", "torch.is_grad_enabled"),
    *("torch.are_deterministic_algorithms_enabled", "torch.is_deterministic_algorithms_warn_only_enabled"),
    *("torch.is_inference_mode_enabled", "torch.is_anomaly_enabled", "torch.is_warn_always_enabled"),
    *("torch.is_autocast_cache_enabled", "torch.get_deterministic_debug_mode", "torch.cuda.is_available"),
    *("torch.backends.mha.get_fastpath_enabled", "torch.backends.mkldnn.is_available"),
    *(f"torch.backends.cuda.{kind}_sdp_enabled" for kind in ("flash", "math", "mem_efficient", "cudnn")),
    *("torch.backends.cuda.preferred_linalg_library", "torch.backends.mps.is_available"),
    *("torch.backends.cuda.preferred_blas_library", "torch.nn.utils.parametrize._cache_enabled"),
    *("torch.distributed.is_available", "torch.utils.deterministic.fill_uninitialized_memory"),
    *(f"torch.backends.cuda.matmul.{name}" for name in ("allow_tf32", "allow_fp16_reduced_precision_reduction")),
    *(f"torch.backends.cudnn.{name}" for name in ("enabled", "benchmark", "deterministic", "allow_tf32")),
    *("torch.backends.mkldnn.enabled", "torch.backends.mkldnn.deterministic", "torch.backends.nnpack.enabled"),
)
"""Functions without arguments, and values, that a forward or the exporter may ask."""
_MODULES = (
    *("torch", "torch.functional", "torch.special", "torch.linalg", "torch.fft", "torch._VF", "torch.autograd"),
    *("torch.nn", "torch.nn.functional", "torch.nn.init", "torch.nn.parameter", "torch.nn.modules"),
)
"""Modules with what a forward calls; all of them are there once torch is imported, so that it is always the same."""
_CLASSES = (torch.Tensor, torch.autograd.Function, torch.nn.Parameter)
_NAMES = (type(None), bool, int, float, complex, str, bytes)


def environment_facts() -> dict[str, Any]:
    """Describes the versions, our own code, the user's code, and the state of torch that affects the exporter.

    Raises:
        NotCacheableError: a mode is active that changes torch's functions, such as the check's mode without dropout.
    """
    from torch.overrides import _get_current_function_mode
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    for mode in (_get_current_function_mode(), _get_current_dispatch_mode()):
        if mode is not None:
            raise NotCacheableError(f"the mode {type(mode).__name__} changes what torch's functions do")
    return {
        "python": sys.version,
        "versions": {name: version for name in _PACKAGES if (version := files.version(name))},
        "installed": files.installed_packages(),
        "ortlaunch": files.digest_of_files(sorted(Path(ortlaunch.__file__).parent.rglob("*.py"))),
        "user code": {name: files.digest(path) for name, path in sorted(files.user_modules().items())},
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith("ORTMODULE_")},
        "switches": {name: _ask(name) for name in _SWITCHES},
        "autocast": [
            [kind, torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))] for kind in ("cpu", "cuda")
        ],
        "symbolics": _custom_symbolics(),
        "functions of torch": functions_of_torch(),
    }


def replaced() -> dict[str, Any]:
    """Returns functions and objects that a program has put into torch, by their place."""
    return {
        where: value
        for where, value in _members_of_torch()
        if _owner(value) is Origin.USER or isinstance(value, functools.partial)
    }


def _ask(name: str) -> str:
    value: Any = torch
    try:
        for part in name.split(".")[1:]:
            value = getattr(value, part)
        return str(value() if callable(value) else value)
    except Exception as error:
        # A build of torch may lack it, and then a forward cannot ask it either.
        return type(error).__name__


def functions_of_torch() -> str:
    """Returns a digest of what each name of torch stands for: a program may have exchanged two functions of it."""
    names = [f"{where} {_identity(value)}" for where, value in _members_of_torch()]
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()


def _identity(value: Any) -> str:
    if type(value) in _NAMES:
        return repr(value)
    return f"{type(value).__qualname__} {getattr(value, '__module__', '')} {getattr(value, '__qualname__', '')}"


def _members_of_torch() -> Iterator[tuple[str, Any]]:
    """Yields what modules and classes of torch hold that a forward calls, each with its place."""
    classes = dict.fromkeys(_CLASSES)
    modules = [name for name in list(sys.modules) if name in _MODULES or name.startswith("torch.nn.modules.")]
    for name in modules:
        for key, value in list(vars(sys.modules[name]).items()):
            if isinstance(value, type) and value.__module__.startswith("torch.nn.modules."):
                classes[value] = None
            if not key.startswith("__") and not isinstance(value, types.ModuleType):
                yield f"{name}.{key}", value
    for cls in classes:
        for key, value in list(vars(cls).items()):
            for accessor in _functions_in(value):
                yield f"{cls.__module__}.{cls.__qualname__}.{key}", accessor


def _functions_in(member: Any) -> tuple[Any, ...]:
    if isinstance(member, property):
        return (member.fget, member.fset)
    if isinstance(member, staticmethod | classmethod):
        return (member.__func__,)
    return (member,)


def _owner(value: Any) -> Origin:
    if isinstance(value, types.MethodType):
        value = value.__func__
    if isinstance(value, types.FunctionType):
        return files.function_origin(value)
    return files.module_origin((value if isinstance(value, type) else type(value)).__module__)


def _custom_symbolics() -> list[str]:
    """Returns operators with a custom export and the function that exports each: ORTModule's or ours.

    Raises:
        NotCacheableError: the user's program has registered one.
    """
    # The old module name works with every torch, because the compatibility layer provides it.
    from torch.onnx._internal import registration

    found = []
    for name in registration.registry.all_functions():
        # Entries without a domain are autograd classes, which the exporter adds when it first meets each of them
        # (such as ORTModule's identity at every output). Their code is described with all other code.
        if name.startswith("::"):
            continue
        group = registration.registry.get_function_group(name)
        function = group.get(_OPSET) if group is not None else None
        home = getattr(function, "__module__", None) or type(function).__module__
        if function is None or home.startswith("torch.onnx"):
            continue
        if files.module_origin(home) is Origin.USER:
            raise NotCacheableError(f"the program has registered an export of its own for {name}")
        found.append(f"{name} {home}.{getattr(function, '__qualname__', type(function).__qualname__)}")
    return sorted(found)
