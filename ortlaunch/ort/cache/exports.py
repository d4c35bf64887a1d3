"""Keeps ORTModule's exports in the user's cache, so that the second start of the same run does not export again.

A hit replaces ORTModule's ``_export_model``: two forwards of the model, its tracing and its conversion. The shapes that
ORTModule infers for the exported graph are kept beside it (`shaped`). The gradient graph and the session are made at
every start.

Exports that could differ at another start are not stored: those whose trace depends on a tensor's value, those that
change the model, those that run code which the key does not describe or that read something from outside, and those
that contain addresses of this process (custom ``autograd.Function``).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import pickle
import shutil
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.jit import TracerWarning  # type: ignore[attr-defined]

from ortlaunch.base import unpickling
from ortlaunch.base.ownership import why_foreign
from ortlaunch.base.reading import read_bytes
from ortlaunch.ort import extension
from ortlaunch.ort.cache import executed, sealed, shaped, torch_state, untraced
from ortlaunch.ort.cache import key as export_key
from ortlaunch.ort.cache.files import NotCacheableError
from ortlaunch.ort.mends import functions
from ortlaunch.ort.verify import value_reads

_KEPT = 100
"""Number of exports kept for the installed versions; the oldest are deleted. An export takes about a megabyte."""
_SETTINGS = (
    "onnx_opset_version",
    "enable_custom_autograd_function",
    "enable_zero_stage3_support",
    "enable_embedding_sparse_optimizer",
)
_NAMES = frozenset(
    {
        ("ortlaunch.ort.cache.exports", "_Export"),
        ("ortlaunch.ort.mends.outputs", "Outputs"),
        ("ortlaunch.ort.mends.decisions", "Decisions"),
        ("onnxruntime.training.utils.torch_io_helper", "_TensorStub"),
        ("onnxruntime.training.ortmodule._io", "_TensorStub"),
        ("collections", "OrderedDict"),
        ("torch", "Size"),
    }
)
"""Classes of which a stored export is made, by module and name."""

_reads_kept = True
"""Whether kept exports are read."""


@dataclass
class ExportCache:
    """The use of the cache by one wrapped model."""

    origins: list[str] = field(default_factory=list)
    """The origin of each export of this model, in order: "hit", "stored", or why it was not stored."""
    place: Path | None = None
    """The folder of the last export; None if it is not kept."""


@dataclass
class _Export:
    """The results of ORTModule's ``_export_model``, without the model's weights."""

    graph: bytes
    rest: tuple[Any, ...]
    """Its other return values: output schema, graph inputs, graph inputs with gradient."""
    warnings: list[tuple[str, str, int]]
    """The tracer's warnings as (message, file, line), which are repeated at a hit."""


def enable(wrapped: torch.nn.Module) -> None:
    """Makes this ORTModule use the cache from its first forward on."""
    _install()
    inner: Any = wrapped._torch_module
    # After a fallback at construction, the inner module is ORT's plain PyTorch module, which exports nothing.
    if hasattr(inner, "_flattened_module"):
        inner._flattened_module._ortlaunch_export_cache = ExportCache()


@contextlib.contextmanager
def exporting_anew() -> Iterator[None]:
    """Within it, kept exports are not read: a model is exported as at its first start. Its export is kept."""
    global _reads_kept
    before, _reads_kept = _reads_kept, False
    try:
        yield
    finally:
        _reads_kept = before


def origins(wrapped: torch.nn.Module) -> list[str]:
    """Returns the origins of this ORTModule's exports; empty if the cache is off or nothing was exported yet."""
    flattened = getattr(wrapped._torch_module, "_flattened_module", None)
    cache = getattr(flattened, "_ortlaunch_export_cache", None)
    return [] if cache is None else list(cache.origins)


def folder() -> Path:
    """Returns the folder with the exports for the installed versions; it has one folder for each key."""
    return extension.cache_dir() / "exports"


@functools.cache
def _install() -> None:
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager

    original = GraphTransitionManager._export_model

    def export_model(**arguments: Any) -> Any:
        cache = getattr(arguments["flattened_module"], "_ortlaunch_export_cache", None)
        if cache is None:
            return original(**arguments)
        return _export_or_load(cache, original, arguments)

    process = GraphTransitionManager._post_export_process

    def post_export_process(*, flatten_module: Any, **rest: Any) -> Any:
        cache = getattr(flatten_module, "_ortlaunch_export_cache", None)
        with shaped.kept_in(None if cache is None else cache.place, is_read=_reads_kept):
            return process(flatten_module=flatten_module, **rest)

    GraphTransitionManager._export_model = staticmethod(export_model)
    GraphTransitionManager._post_export_process = staticmethod(post_export_process)
    GraphTransitionManager._infer_shapes = staticmethod(shaped.keeping(GraphTransitionManager._infer_shapes))


def _export_or_load(cache: ExportCache, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    cache.place = None
    try:
        facts, codes = _facts(arguments)
    except NotCacheableError as error:
        cache.origins.append(f"not stored: {error}")
        return original(**arguments)
    place = folder() / hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    kept = _load(place) if _reads_kept and why_not_own(place) is None else None
    if kept is not None:
        cache.origins.append("hit")
        cache.place = place
        return _replay(kept)
    before = _buffers(arguments["flattened_module"])
    with untraced.watch() as taken, value_reads.watch() as reads, warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with executed.watch() as ran:
            result = original(**arguments)
    _repeat_warnings([(warning.message, warning.filename, warning.lineno) for warning in heard])
    reason = _why_not(arguments, facts, before, result[0], reads + taken) or executed.why_not(ran, codes)
    if reason is None:
        reason = _store(place, facts, _pack(result, heard))
    if reason is None:
        cache.place = place
    cache.origins.append("stored" if reason is None else f"not stored: {reason}")
    return result


def _facts(arguments: dict[str, Any]) -> tuple[dict[str, Any], frozenset[types.CodeType]]:
    """Returns what the export depends on, and the user's code that this covers."""
    model = export_key.describe_model(arguments["flattened_module"]._original_module)
    facts = {
        "model": model.facts,
        "inputs": export_key.input_facts(arguments["model_info_for_export"]),
        "surroundings": torch_state.environment_facts(),
        "settings": {name: arguments[name] for name in _SETTINGS},
        "device": arguments["device"].type,
    }
    return facts, model.codes


def _why_not(
    arguments: dict[str, Any],
    facts: dict[str, Any],
    buffers: dict[str, torch.Tensor],
    graph: Any,
    reads: list[value_reads.ValueRead],
) -> str | None:
    """Returns why the export cannot be used by another start; None if it can."""
    if reads:
        return f"the trace depends on a tensor's value at {reads[0]}"
    model = arguments["flattened_module"]
    for name, buffer in model.named_buffers():
        if name not in buffers or not torch.equal(buffer, buffers[name]):
            return f"the export changes the buffer {name.removeprefix('_original_module.')}"
    try:
        after = export_key.describe_model(model._original_module, is_exported=True).facts
    except NotCacheableError as error:
        return str(error)
    for name, described in facts["model"]["modules"].items():
        if export_key.changed(described, after["modules"].get(name)):
            return f"the export changes an attribute of {name or 'the model'}"
    for name, described in facts["model"]["reached"].items():
        if export_key.changed(described, after["reached"].get(name)):
            return f"the export changes what {name} reads"
    if functions.are_called() or any(node.op_type == "PythonOp" for node in graph.graph.node):
        return "the graph calls a custom autograd.Function of this process"
    return None


def _pack(result: Any, heard: list[warnings.WarningMessage]) -> _Export:
    graph, *rest = result
    return _Export(
        graph=graph.SerializeToString(),
        rest=tuple(rest),
        warnings=[
            (str(warning.message), warning.filename, warning.lineno)
            for warning in heard
            if issubclass(warning.category, TracerWarning)
        ],
    )


def _replay(kept: _Export) -> Any:
    import onnx

    _repeat_warnings([(TracerWarning(text), file, line) for text, file, line in kept.warnings])
    return (onnx.load_model_from_string(kept.graph), *kept.rest)


def _repeat_warnings(heard: list[tuple[Any, str, int]]) -> None:
    for message, file, line in heard:
        warnings.warn_explicit(message, type(message), file, line)


def _buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def why_not_own(place: Path) -> str | None:
    """Why others may have written an export; None if only this user may."""
    for path in (place.parent.parent, place.parent, place, place / "export", place / shaped.FILE):
        if why := why_foreign(path):
            return f"{path} {why}"
    return None


def _load(place: Path) -> _Export | None:
    """Returns the export if it exists and is complete."""
    try:
        kept = unpickling.loads(sealed.opened(read_bytes(place / "export", shaped.LARGEST)), _known)
    except FileNotFoundError:
        return None
    except Exception:
        # Whatever the error is, a new export fixes it.
        shutil.rmtree(place, ignore_errors=True)
        return None
    # The time of use decides which export is the oldest. A cache inside an image may be read-only, which is fine.
    with contextlib.suppress(OSError):
        os.utime(place)
    return kept if isinstance(kept, _Export) else None


def _store(place: Path, facts: dict[str, Any], export: _Export) -> str | None:
    """Stores the export atomically; returns why it could not be stored."""
    try:
        payload = pickle.dumps(export)
        unpickling.loads(payload, _known)
    except Exception as error:
        return f"the outputs' structure cannot be saved ({error})"
    if why := why_not_own(place):
        return why
    try:
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        scratch = Path(tempfile.mkdtemp(dir=place.parent, prefix=".new-"))
        try:
            (scratch / "export").write_bytes(sealed.seal(payload))
            # The facts are stored for people, to find out why the key of another start differs.
            (scratch / "facts.json").write_text(json.dumps(facts, indent=1, sort_keys=True))
            # Another rank may have stored the same export already.
            if not place.exists():
                scratch.rename(place)
        except OSError:
            if not place.exists():
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        _prune(place.parent)
    except OSError as error:
        return f"{place}: {error}"
    return None


def _known(module: str, name: str) -> Any:
    """What a name in a stored export stands for; None for a name that no export has.

    Besides a few classes of ORTModule and ortlaunch, these are the structures that models return: named tuples and
    transformers' outputs. They may be the user's own. Only modules that the model has imported are looked into, so a
    stored export imports nothing, and a named tuple or an output can only hold values.
    """
    if (module, name) in _NAMES:
        return getattr(sys.modules.get(module), name, None)
    found = getattr(sys.modules.get(module), name, None)
    if module == "torch" and isinstance(found, torch.dtype):
        return found
    if not isinstance(found, type):
        return None
    if issubclass(found, tuple):
        return found if hasattr(found, "_fields") else None
    outputs = getattr(sys.modules.get("transformers.utils.generic"), "ModelOutput", None)
    return found if isinstance(outputs, type) and issubclass(found, outputs) else None


def _prune(exports: Path) -> None:
    by_age = sorted((path for path in exports.iterdir() if path.is_dir()), key=_age, reverse=True)
    for path in by_age[_KEPT:]:
        shutil.rmtree(path, ignore_errors=True)


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
