"""Describes everything that an export depends on, so that two exports with the same description give the same graph.

ORTModule's own cache (``ORTMODULE_CACHE_DIR``) identifies a model by its printed form, which shows neither its code nor
its inputs nor its mode. Here all of these count: the code of every class in the tree and of everything imported that is
not an installed package, the values that this code reads (`reachable_code`), the attributes of every module, parameters
and buffers by shape and dtype, the inputs by shape, the versions, and the exporter's settings. If anything cannot be
described, the export is not cached.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import importlib.metadata
import logging
import os
import pathlib
import sys
import sysconfig
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import ortlaunch
from ortlaunch.ort.cache.reachable_code import NotCacheableError, Origin, ReachableCode, cells_of, file_origin

_OPSET = 17
"""The version of the ONNX operators with which ORTModule exports."""
_PACKAGES = ("torch", "onnx", "onnxruntime-training", "onnxruntime-training-cpu", "transformers", "numpy")
# transformers stores a hash() here, which differs between processes.
_NOT_ATTRIBUTES_OF_OBJECTS = {"_original_object_hash"}
_SCALARS = (type(None), bool, int, float, complex, str, bytes, enum.Enum, pathlib.PurePath)
_TORCH_SCALARS = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.WrapperDescriptorType)
# These belong to a module's own bookkeeping. Their content is described separately, or does not reach the graph.
_NOT_ATTRIBUTES = {"_parameters", "_buffers", "_modules"}
_NOT_ATTRIBUTES |= {f"_{kind}_hooks" for kind in ("backward", "backward_pre", "state_dict", "state_dict_pre")}
_NOT_ATTRIBUTES |= {"_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"}


def model_facts(model: torch.nn.Module) -> dict[str, Any]:
    """Describes a module tree: code, attributes, parameters and buffers, without the tensors' values.

    Raises:
        NotCacheableError: a module has an attribute that cannot be described, or code without a file.
    """
    describe = _Describe(model)
    modules = {name: describe.module(module) for name, module in model.named_modules(remove_duplicate=False)}
    names: dict[int, str] = {}
    tensors = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        # Tied weights are a single input of the graph.
        tensors[name] = [*_tensor(parameter), names.setdefault(id(parameter), name)]
    for name, buffer in model.named_buffers(remove_duplicate=False):
        tensors[name] = [*_tensor(buffer), names.setdefault(id(buffer), name)]
    return {
        "modules": modules,
        "tensors": tensors,
        "hooks of all modules": describe.value("a hook of all modules", _global_hooks()),
        "reached": describe.reached.facts(),
        "code": describe.code_digests(),
        "packages": describe.package_versions(),
    }


def changed(before: Any, after: Any) -> bool:
    """Whether two descriptions differ, except for values that were None and have been set.

    transformers' classifiers set such a value at the first forward: the kind of loss in their configuration.
    """
    if before == after or before == ["NoneType", "None"]:
        return False
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        return any(changed(value, after[key]) for key, value in before.items())
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return any(changed(*pair) for pair in zip(before, after, strict=True))
    return True


def input_facts(info: Any) -> dict[str, Any]:
    """Describes the inputs that ORTModule has parsed (its ``ModelInfoForExport``), by shape and not by value."""
    describe = _Describe(None)
    return {
        "mode": str(info.export_mode),
        "names": info.onnx_graph_input_names,
        "shapes": info.onnx_graph_input_shapes,
        "require_grad": info.onnx_graph_input_names_require_grad,
        "args": describe.value("args", list(info.onnx_graph_input_arg_schema)),
        "kwargs": describe.value("kwargs", dict(info.onnx_graph_input_kwarg_schema)),
        "extra": describe.value("extra", dict(info.export_extra_kwargs or {})),
    }


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
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
        "ortlaunch": _files_digest(sorted(Path(ortlaunch.__file__).parent.rglob("*.py"))),
        "user code": {name: _digest(path) for name, path in sorted(_user_modules().items())},
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith("ORTMODULE_")},
        "default dtype": str(torch.get_default_dtype()),
        "autocast": [
            [kind, torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))] for kind in ("cpu", "cuda")
        ],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "symbolics": _custom_symbolics(),
    }


def _global_hooks() -> list[Any]:
    """Returns hooks that torch calls at the forward of every module."""
    return [
        hook
        for name in ("_global_forward_pre_hooks", "_global_forward_hooks")
        for hook in getattr(torch.nn.modules.module, name).values()
    ]


class _Describe:
    """Converts values to nested lists of plain values, and collects the files with their code."""

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._names = {} if model is None else {id(module): name for name, module in model.named_modules()}
        self._seen: dict[int, tuple[int, Any]] = {}
        self._files: set[Path] = set()
        self._packages: set[str] = set()
        self.reached = ReachableCode(self.value, _origin)

    def module(self, module: torch.nn.Module) -> list[Any]:
        attributes = {key: value for key, value in vars(module).items() if key not in _NOT_ATTRIBUTES}
        for key, value in attributes.items():
            if key.startswith("_forward") and "hooks" in key:
                # The keys of this dictionary number all hooks of the process.
                attributes[key] = list(value.values())
        where = self._names[id(module)] or "model"
        return [
            self._class(type(module), is_made=False),
            {key: self.value(f"{where}.{key}", v) for key, v in attributes.items()},
        ]

    def value(self, where: str, value: Any) -> Any:
        """Describes a value; raises NotCacheableError with `where` if it has no complete description."""
        if isinstance(value, _SCALARS + _TORCH_SCALARS):
            return [type(value).__name__, repr(value)]
        if isinstance(value, torch.nn.Module):
            if id(value) not in self._names:
                raise NotCacheableError(f"{where} holds a module that is not registered")
            return ["module", self._names[id(value)]]
        if isinstance(value, logging.Logger):
            return ["logger"]
        if isinstance(value, type):
            return self._class(value, is_made=True)
        if id(value) in self._seen:
            return ["seen", self._seen[id(value)][0]]
        # The value is kept alive, so that its id stays unique.
        self._seen[id(value)] = (len(self._seen), value)
        if isinstance(value, torch.Tensor):
            # The tensor is not registered, so it is a constant in the graph.
            return [*_tensor(value), hashlib.sha256(_bytes(value)).hexdigest()]
        if isinstance(value, (*_FUNCTIONS, functools.partial)):
            return self._function(where, value)
        return self._container(where, value)

    def code_digests(self) -> dict[str, str]:
        """Returns a digest of each file with described code; torch's own code is identified by its version."""
        return {str(path): _digest(path) for path in sorted(self._files)}

    def package_versions(self) -> dict[str, str]:
        """Returns the versions of the installed packages with that code; they stand for the packages' other files."""
        versions: dict[str, str] = {}
        for package in sorted(self._packages):
            # Most packages have the name of what they install. The list of all packages takes a while to build.
            names = [package] if _version(package) else _distributions().get(package, [])
            versions |= {name: importlib.metadata.version(name) for name in names}
        return versions

    def _container(self, where: str, value: Any) -> Any:
        kind = self._class(type(value), is_made=False)
        if isinstance(value, Mapping):
            items: Any = [[self.value(where, key), self.value(f"{where}[{key!r}]", v)] for key, v in value.items()]
        elif isinstance(value, set | frozenset):
            items = sorted(repr(self.value(where, item)) for item in value)
        elif isinstance(value, list | tuple):
            items = [self.value(f"{where}[{index}]", item) for index, item in enumerate(value)]
        elif type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
            return [kind, str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
        elif not _attributes(value) and not hasattr(value, "__dict__"):
            raise NotCacheableError(f"{where} is a {type(value).__qualname__}")
        else:
            items = []
        attributes = {key: v for key, v in _attributes(value).items() if key not in _NOT_ATTRIBUTES_OF_OBJECTS}
        return [kind, items, {key: self.value(f"{where}.{key}", v) for key, v in attributes.items()}]

    def _function(self, where: str, value: Any) -> Any:
        if isinstance(value, functools.partial):
            return ["partial", self.value(where, value.func), self.value(where, [value.args, value.keywords])]
        if isinstance(value, types.MethodType):
            return ["method", self.value(where, value.__func__), self.value(where, value.__self__)]
        code = getattr(value, "__code__", None)
        if code is None:
            return ["builtin", value.__qualname__]
        if not code.co_filename.startswith("<"):
            self._add_file(where, code.co_filename)
        # Code without a file, such as the methods of a dataclass, is identified by its instructions.
        self.reached.add_function(value)
        parts = [value.__defaults__ or (), value.__kwdefaults__ or {}, cells_of(value), vars(value)]
        return ["function", value.__module__, value.__qualname__, code.co_firstlineno, self.value(where, parts)]

    def _class(self, cls: type, *, is_made: bool) -> list[Any]:
        self.reached.add_class(cls, is_made=is_made)
        if id(cls) not in self._seen:
            self._seen[id(cls)] = (len(self._seen), cls)
            for base in cls.__mro__:
                self._base(base)
        return ["class", cls.__module__, cls.__qualname__]

    def _base(self, cls: type) -> None:
        """Adds the file with the code of one class."""
        source = sys.modules.get(cls.__module__)
        where = f"{cls.__module__}.{cls.__qualname__}"
        if source is None:
            raise NotCacheableError(f"the module of {where} is not imported")
        if getattr(source, "__file__", None) is None:
            if cls.__module__ not in sys.builtin_module_names:
                raise NotCacheableError(f"{where} has no file")
            return
        # Our own code is described as a whole.
        if source.__name__.partition(".")[0] == "ortlaunch":
            return
        if self._add_file(where, str(source.__file__)) and _is_installed(Path(str(source.__file__))):
            self._packages.add(cls.__module__.partition(".")[0])

    def _add_file(self, where: str, name: str) -> bool:
        """Adds a file; returns whether it is identified by its content."""
        path = Path(name)
        if (
            path.is_relative_to(_torch_folder())
            or _is_stdlib(path)
            or name.startswith("<frozen")
            or path.suffix == ".so"
        ):
            return False
        if not path.is_file():
            raise NotCacheableError(f"the code of {where} is in no file ({name})")
        self._files.add(path)
        return True


def _attributes(value: Any) -> dict[str, Any]:
    slots = [name for cls in type(value).__mro__ for name in _slots(cls) if hasattr(value, name)]
    return {name: getattr(value, name) for name in slots} | dict(getattr(value, "__dict__", {}))


def _slots(cls: type) -> list[str]:
    """Returns the names of the slots of one class; Python prefixes private ones with the class name."""
    slots = vars(cls).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else slots
    private = f"_{cls.__name__.lstrip('_')}"
    return [private + name if name.startswith("__") and not name.endswith("__") else name for name in names]


def _tensor(tensor: torch.Tensor) -> list[Any]:
    return ["tensor", str(tensor.dtype), list(tensor.shape), tensor.device.type, tensor.requires_grad]


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _user_modules() -> dict[str, Path]:
    """Returns imported modules that belong to neither the standard library, an installed package nor ortlaunch."""
    modules = {}
    for name, module in list(sys.modules.items()):
        # The top-level package decides, because packages also create modules without a file or with unusual ones.
        top = _file(sys.modules.get(name.partition(".")[0]))
        file = _file(module)
        if top is not None and file is not None and not _is_installed(top):
            modules[name] = file
    return modules


def _file(module: types.ModuleType | None) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file) if isinstance(file, str) else None


def _custom_symbolics() -> list[str]:
    """Returns operators with a custom export and the function that exports each: ORTModule's, ours or the user's."""
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
        if function is not None and not home.startswith("torch.onnx"):
            found.append(f"{name} {home}.{getattr(function, '__qualname__', type(function).__qualname__)}")
    return sorted(found)


def _files_digest(paths: Iterable[Path]) -> str:
    return hashlib.sha256("".join(_digest(path) for path in paths).encode()).hexdigest()


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise NotCacheableError(f"{path} cannot be read: {error}") from error


@functools.cache
def _is_installed(path: Path) -> bool:
    paths = sysconfig.get_paths()
    folders = [Path(paths[key]) for key in ("purelib", "platlib")]
    folders += [Path(entry) for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    folders.append(Path(ortlaunch.__file__).parent)
    return _is_stdlib(path) or any(path.is_relative_to(folder) for folder in folders)


@functools.cache
def _origin(file: str) -> Origin:
    return file_origin(file, _is_installed, [_torch_folder(), _stdlib_folder(), Path(ortlaunch.__file__).parent])


@functools.cache
def _torch_folder() -> Path:
    return Path(torch.__file__).parent


def _is_stdlib(path: Path) -> bool:
    # Outside a virtual environment the packages are in a subfolder of the standard library.
    return path.is_relative_to(_stdlib_folder()) and not {"site-packages", "dist-packages"} & set(path.parts)


@functools.cache
def _stdlib_folder() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
