"""Keeps ORTModule's exports in the user's cache, so that the second start of the same run does not trace and convert.

The key describes the installed packages, the user's and our own files, the model (`python_values`) and its inputs. It
need not be complete: a kept graph is read only where its results are compared with PyTorch's (`judged`), and one that
is found wrong is forgotten, and exported anew. A hit still runs the model's forward once, as ORTModule does to find its
outputs. What ORTModule infers for a graph is kept by the graph's own bytes.

Not kept are graphs whose trace has read a tensor's value, and those that call functions of this process.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import ortlaunch
from ortlaunch.base import files, own_code
from ortlaunch.base.ownership import why_foreign
from ortlaunch.base.reading import read_bytes
from ortlaunch.ort import extension
from ortlaunch.ort.module.python_values import described, described_value
from ortlaunch.ort.tracing import functions, value_reads

_KEPT = 200
"""Number of files kept for the installed versions; the oldest are deleted. Most have about a megabyte."""
_LARGEST = 2 << 30
"""The largest kept file that is read, in bytes; protobuf has the same limit for a graph."""
_DIGEST = hashlib.sha256().digest_size
_OPSET = 17
"""The version of the ONNX operators with which ORTModule exports."""
_SETTINGS = ("onnx_opset_version", "enable_custom_autograd_function", "enable_zero_stage3_support")
_SWITCHES = (
    *("get_default_dtype", "get_float32_matmul_precision", "is_grad_enabled", "is_autocast_cache_enabled"),
    *("are_deterministic_algorithms_enabled", "cuda.is_available", "backends.mha.get_fastpath_enabled"),
    *(f"backends.cuda.{kind}_sdp_enabled" for kind in ("flash", "math", "mem_efficient", "cudnn")),
    *("backends.cuda.matmul.allow_tf32", "backends.cudnn.enabled", "backends.cudnn.allow_tf32"),
)
"""Functions of torch without arguments, and values, that a forward or the exporter may ask."""

_is_judged: ContextVar[bool] = ContextVar("_is_judged", default=False)
_graphs: set[bytes] = set()
"""Digests of the graphs that this process has read or kept."""
_Found = TypeVar("_Found")


@dataclass
class _Use:
    """The use of the cache by one ORTModule."""

    origins: list[str] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    """The kept exports that it has read or written."""
    is_read: bool = True
    has_hit: bool = False
    """Whether a graph that it runs was read."""


def enable(wrapped: torch.nn.Module) -> None:
    """Makes this ORTModule use the cache from its first forward on."""
    inner: Any = wrapped._torch_module
    # After a fallback at construction, the inner module is ORT's plain PyTorch module, which exports nothing.
    if hasattr(inner, "_flattened_module"):
        inner._flattened_module._ortlaunch_cache = _Use()


def origins(wrapped: torch.nn.Module) -> list[str]:
    """Returns the origin of each export, in order: "hit", "stored", or why it was not stored; empty without a cache."""
    use = _use_of(wrapped)
    return [] if use is None else list(use.origins)


def folder() -> Path:
    """Returns the folder with the exports for the installed versions."""
    return extension.cache_dir() / "exports"


def judged(wrapped: torch.nn.Module, compare: Callable[[], _Found]) -> _Found:
    """Compares an ORTModule with PyTorch; a graph of the cache with which it differs is forgotten, and it exports anew.

    Args:
        wrapped: the ORTModule.
        compare: returns something true, or raises, where the graphs that it runs are wrong.
    """
    with reading():
        try:
            found = compare()
        except Exception:
            if not forget(wrapped):
                raise
            return compare()
        return compare() if found and forget(wrapped) else found


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Has exports read kept graphs meanwhile; the caller compares what they compute."""
    token = _is_judged.set(True)
    try:
        yield
    finally:
        _is_judged.reset(token)


def forget(wrapped: torch.nn.Module) -> bool:
    """Deletes the kept exports of an ORTModule; returns whether it has run one of them, and will export anew."""
    use = _use_of(wrapped)
    if use is None:
        return False
    for path in use.paths:
        with contextlib.suppress(OSError):
            path.unlink()
    use.is_read = False
    use.paths.clear()
    had_hit, use.has_hit = use.has_hit, False
    if had_hit:
        inner: Any = wrapped._torch_module
        for is_training in (True, False):
            # Without its guard, a graph is exported again.
            vars(inner._execution_manager(is_training)).pop("_ortlaunch_guard", None)
    return had_hit


def export(original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Exports a model, or reads what was exported.

    Args:
        original: ORTModule's ``_get_exported_model``.
        arguments: its arguments.
    """
    use: _Use | None = getattr(arguments["flattened_module"], "_ortlaunch_cache", None)
    if use is None:
        return original(**arguments)
    facts = _facts(arguments)
    text = json.dumps(facts, indent=1, sort_keys=True)
    path = folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.onnx"
    reason = why_not_own(path) or _unusual_mode()
    if reason is None and use.is_read and _is_judged.get() and (content := _read(path)) is not None:
        use.origins.append("hit")
        use.paths.append(path)
        use.has_hit = True
        return _loaded(content), _outputs_of(arguments)
    with value_reads.watch() as reads:
        result = original(**arguments)
    if reads:
        reason = f"the trace depends on a tensor's value at {reads[0]}"
    elif functions.are_called() or any(node.op_type == "PythonOp" for node in result[0].graph.node):
        reason = "the graph calls a custom autograd.Function of this process"
    if reason is None:
        content = result[0].SerializeToString(deterministic=True)
        # The facts are for people, to find out why the key of another start differs.
        reason = _write(path, content) or _write(path.with_suffix(".json"), text.encode())
        _graphs.add(hashlib.sha256(content).digest())
    use.origins.append("stored" if reason is None else f"not stored: {reason}")
    if reason is None:
        use.paths.append(path)
    return result


def install() -> None:
    """Keeps what ORTModule infers for graphs that are kept; repeated calls do nothing."""
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager

    if not hasattr(GraphTransitionManager, "_ortlaunch_infer"):
        infer = keeping(_with_inputs_of_any_size(GraphTransitionManager._infer_shapes))
        GraphTransitionManager._infer_shapes = GraphTransitionManager._ortlaunch_infer = staticmethod(infer)


def _with_inputs_of_any_size(infer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Keeps an inference of shapes from giving an input a number for a size that it does not know.

    It takes a size that meets a 4 in a sum for 4. A mask may have 1 there, which an evaluation would refuse.
    """

    def inferred(model: Any) -> Any:
        sizes = {one.name: [size.dim_param for size in _sizes(one)] for one in model.graph.input}
        shaped = infer(model)
        for one in shaped.graph.input:
            for size, name in zip(_sizes(one), sizes.get(one.name, ()), strict=False):
                if name and size.HasField("dim_value"):
                    size.dim_param = name
        return shaped

    return inferred


def _sizes(value: Any) -> Any:
    return value.type.tensor_type.shape.dim


def keeping(infer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Makes an inference of shapes keep its results for graphs that are kept, and use kept ones.

    Args:
        infer: takes an ``onnx.ModelProto``, which it changes, and returns one with shapes.
    """

    def inferred(model: Any) -> Any:
        digest = hashlib.sha256(model.SerializeToString(deterministic=True)).digest()
        path = folder() / f"{hashlib.sha256(digest + _software().encode()).hexdigest()[:32]}.shapes"
        is_kept = digest in _graphs and why_not_own(path) is None
        if is_kept and _is_judged.get() and (content := _read(path)) is not None:
            return _parsed(content)
        state = random.getstate()
        try:
            shaped = infer(model)
        finally:
            # sympy draws some, and a kept graph draws none.
            random.setstate(state)
        if is_kept:
            _write(path, shaped.SerializeToString())
        return shaped

    return inferred


def why_not_own(path: Path) -> str | None:
    """Why others may have written a kept file; None if only this user may."""
    places = (path.parent.parent, path.parent, path)
    return next((f"{place} {why}" for place in places if (why := why_foreign(place))), None)


def _use_of(wrapped: torch.nn.Module) -> _Use | None:
    flattened = getattr(wrapped._torch_module, "_flattened_module", None)
    use: _Use | None = getattr(flattened, "_ortlaunch_cache", None)
    return use


def _loaded(content: bytes) -> Any:
    _graphs.add(hashlib.sha256(content).digest())
    return _parsed(content)


def _parsed(content: bytes) -> Any:
    import onnx

    return onnx.load_model_from_string(content)


def _outputs_of(arguments: dict[str, Any]) -> Any:
    """Runs the forward by which ORTModule finds the structure of the outputs, and returns this."""
    from onnxruntime.training.ortmodule import _io

    module = arguments["flattened_module"]
    is_copied = arguments["deepcopy_before_model_export"] and _io.can_module_be_deep_cloned(module, arguments["device"])
    return _io.parse_outputs_for_onnx_export_and_extract_schema(
        module, arguments["flatten_module_inputs"], arguments["logger"], is_copied
    )[2]


def _facts(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns what the export depends on."""
    info = arguments["model_info_for_export"]
    return {
        "model": described(arguments["flattened_module"]._original_module),
        "inputs": {
            "mode": str(info.export_mode),
            "names": info.onnx_graph_input_names,
            "shapes": info.onnx_graph_input_shapes,
            "require_grad": info.onnx_graph_input_names_require_grad,
            "args": described_value(list(info.onnx_graph_input_arg_schema)),
            "kwargs": described_value(dict(info.onnx_graph_input_kwarg_schema)),
            "extra": described_value(dict(info.export_extra_kwargs or {})),
        },
        "software": _software(),
        "user's files": own_code.digests(own_code.imported()),
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith("ORTMODULE_")},
        "switches": {name: _ask(name) for name in _SWITCHES},
        "autocast": [
            [kind, torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))] for kind in ("cpu", "cuda")
        ],
        "symbolics": _own_symbolics(),
        "settings": {name: arguments[name] for name in _SETTINGS},
        "device": arguments["device"].type,
    }


def _software() -> str:
    """Returns a digest of Python's version, of all installed packages' names and versions, and of our own files."""
    names = {path.name for entry in sys.path if Path(entry or ".").is_dir() for path in Path(entry or ".").iterdir()}
    installed = sorted(name for name in names if name.endswith((".dist-info", ".egg-info", ".pth")))
    own = _digest_of(sorted(Path(ortlaunch.__file__).parent.rglob("*.py")))
    return hashlib.sha256(repr([sys.version, importlib.metadata.version("torch"), installed, own]).encode()).hexdigest()


def _digest_of(paths: list[Path]) -> str:
    state = hashlib.sha256()
    for path in paths:
        state.update(hashlib.sha256(path.read_bytes()).digest())
    return state.hexdigest()


def _ask(name: str) -> str:
    value: Any = torch
    try:
        for part in name.split("."):
            value = getattr(value, part)
        return str(value() if callable(value) else value)
    except Exception as error:
        # A build of torch may lack it, and then a forward cannot ask it either.
        return type(error).__name__


def _own_symbolics() -> list[str]:
    """Returns the operators whose export is not torch's, and the function that exports each."""
    # The old module name works with every torch, because the compatibility layer provides it.
    from torch.onnx._internal import registration

    found = []
    for name in registration.registry.all_functions():
        group = registration.registry.get_function_group(name)
        function = group.get(_OPSET) if group is not None else None
        home = str(getattr(function, "__module__", None) or type(function).__module__)
        # Entries without a domain are autograd classes, which the exporter adds when it first meets each of them.
        if function is not None and not name.startswith("::") and not home.startswith("torch.onnx"):
            found.append(f"{name} {home}.{getattr(function, '__qualname__', type(function).__qualname__)}")
    return sorted(found)


def _unusual_mode() -> str | None:
    """Says which mode changes what torch's functions do, such as a comparison's without dropout; None without one."""
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    other = (type(mode) for mode in modes if not type(mode).__module__.startswith("ortlaunch.ort.tracing"))
    return next((f"the mode {kind.__name__} changes what torch's functions do" for kind in other), None)


def _read(path: Path) -> bytes | None:
    """Returns a kept content; None if there is none, or the file is damaged."""
    try:
        file = read_bytes(path, _LARGEST + _DIGEST)
    except Exception:
        return None
    content = file[_DIGEST:]
    if hashlib.sha256(content).digest() != file[:_DIGEST]:
        return None
    # The time of use decides which is the oldest. A cache inside an image may be read-only, which is fine.
    with contextlib.suppress(OSError):
        os.utime(path)
    return content


def _write(path: Path, content: bytes) -> str | None:
    """Keeps a content with its digest, atomically; returns why it could not."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        is_text = path.suffix == ".json"
        digest = b"" if is_text else hashlib.sha256(content).digest()
        files.replace(path, digest + content, files.PRIVATE)
        by_age = sorted(path.parent.iterdir(), key=_age, reverse=True)
        for old in by_age[_KEPT:]:
            old.unlink(missing_ok=True)
    except OSError as error:
        return f"{path}: {error}"
    return None


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
