"""Configures ORTModule for ortlaunch: no silent fallback, a share of the cores, and reports of what it did."""

from __future__ import annotations

import contextlib
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ortlaunch.base.modules import hidden
from ortlaunch.config.schema import Fallback, OrtConfig
from ortlaunch.models import modes
from ortlaunch.ort import compat, cuda_libs, extension
from ortlaunch.ort.refusal import cause

_ORT_LEVEL = {"verbose": "VERBOSE", "info": "INFO", "warning": "WARNING", "error": "ERROR", "fatal": "FATAL"}

_CPP_EXTENSION = "torch.utils.cpp_extension"

_MEMORY_LEVEL = "ORTMODULE_MEMORY_OPT_LEVEL"
_RECOMPUTE_LAYERS = "1"
"""ORTModule's memory optimizer level that recomputes everything in a layer that costs no accuracy."""


def import_ortmodule() -> Any:
    """Imports ``onnxruntime.training.ortmodule`` on this torch, with its extensions from the user's cache.

    Returns:
        The module.

    Raises:
        RequestError: onnxruntime-training is not installed, or its extension cannot be built.
    """
    # ORTModule lets these environment variables silently override the arguments of its caller.
    for variable in (
        *("ORTMODULE_FALLBACK_POLICY", "ORTMODULE_FALLBACK_RETRY", "ORTMODULE_LOG_LEVEL"),
        *(_MEMORY_LEVEL, "ORTMODULE_MEMORY_OPT_CONFIG"),
    ):
        os.environ.pop(variable, None)
    cuda_libs.prepare()
    compat.before_import()
    for name in extension.needed():
        if name != extension.KERNELS:
            extension.load(name)
    # ORTModule imports DeepSpeed where it is installed (1 s of a worker's start), and DeepSpeed's autotuner MLflow
    # (1.3 s). A trainer that works through DeepSpeed has imported it before. The hooks, which the first export would
    # import, do the same, and warn that they do not know this DeepSpeed: they are for a ZeRO 3 that is not used here.
    with hidden("mlflow"), hidden("deepspeed"), _without_setuptools():
        from onnxruntime.training import ortmodule

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from onnxruntime.training.utils import hooks  # noqa: F401

    # These are set because ORTModule's own folder has no libraries; ours are already loaded.
    ortmodule._FALLBACK_INIT_EXCEPTION = None
    compat.after_import()
    return ortmodule


@contextlib.contextmanager
def _without_setuptools() -> Iterator[None]:
    """Keeps ORTModule from importing setuptools, by a module of torch of which it reads one variable.

    The variable is the folder of ROCm, and ORTModule uses it with a torch for ROCm alone.
    """
    if torch.version.hip is not None or _CPP_EXTENSION in sys.modules:
        yield
        return
    stand_in = sys.modules[_CPP_EXTENSION] = types.ModuleType(_CPP_EXTENSION)
    stand_in.ROCM_HOME = None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        # Whoever compiles something imports torch's own.
        if sys.modules.get(_CPP_EXTENSION) is stand_in:
            del sys.modules[_CPP_EXTENSION]


def set_seed(seed: int) -> None:
    """Seeds ONNX Runtime's random numbers; in training they are later drawn from torch's at each step."""
    import onnxruntime

    onnxruntime.set_seed(seed)


def wrap(
    model: torch.nn.Module,
    cfg: OrtConfig,
    *,
    threads: int,
    onnx_dir: Path | None,
    recompute: bool = False,
) -> torch.nn.Module:
    """Wraps `model` in an ORTModule.

    Args:
        model: the plain model, already on its device.
        cfg: the backend's configuration.
        threads: the worker's share of the cores, which ONNX Runtime uses if ``backend.threads`` is not set.
        onnx_dir: folder for ``backend.debug.save_onnx``, created when needed; None on a worker that saves nothing.
        recompute: whether ORTModule's memory optimizer recomputes activations in the backward.
    """
    make = _prepare(model, cfg, threads, onnx_dir, arena=True)
    # ORTModule reads this variable in its constructor.
    with _variable(_MEMORY_LEVEL, _RECOMPUTE_LAYERS if recompute else None):
        return make(model, "")


def wrap_blocks(
    model: torch.nn.Module,
    cfg: OrtConfig,
    *,
    threads: int,
    onnx_dir: Path | None,
    recompute: bool = False,
) -> torch.nn.Module:
    """Wraps each repeated block of `model` in its own ORTModule, for ZeRO 3.

    The arguments are those of `wrap`. ``backend.zero3=recompute`` recomputes whatever `recompute` is.

    Returns:
        The model itself: its modules and their names do not change.

    Raises:
        RequestError: the model has no repeated blocks, or none that ``backend.blocks`` names.
    """
    from ortlaunch.ort.blocks import attach
    from ortlaunch.ort.find_blocks import find_blocks

    found = find_blocks(model, cfg.blocks)
    # The sessions get no arena, in which each of them would keep its peak memory, once per block.
    attach(
        found,
        _prepare(model, cfg, threads, onnx_dir, arena=False),
        cfg.zero3,
        may_fall_back=cfg.fallback is Fallback.warn,
    )
    return model


def opset() -> int:
    """Returns the version of the ONNX operators with which ORTModule exports."""
    return int(import_ortmodule().ONNX_OPSET_VERSION)


def is_active(wrapped: torch.nn.Module) -> bool:
    """Whether ONNX Runtime ran the training forward of this ORTModule, or of all blocks, and none has fallen back.

    A block that is called without gradients (frozen, under ``torch.no_grad``) has none but that for evaluation.
    """
    parts = _parts(wrapped)
    return bool(parts) and all(
        any(_trains(one) or (path and _evaluates(one)) for one in part) and not any(map(_fell_back, part))
        for path, part in parts.items()
    )


def fallback_reason(wrapped: torch.nn.Module) -> str | None:
    """Returns why this ORTModule or a block fell back to PyTorch, in one line; None if none did."""
    for path, part in _parts(wrapped).items():
        for ort_module in filter(_fell_back, part):
            reason = cause(ort_module._fallback_manager._exception)
            return f"{path}: {reason}" if path else reason
    return None


def exports(wrapped: torch.nn.Module) -> int:
    """Returns how often the training graph in use of an ORTModule around a whole model has been exported."""
    guard = getattr(training_manager(wrapped), "_ortlaunch_guard", None)
    return 0 if guard is None else int(guard.exports)


def export_seconds(wrapped: torch.nn.Module) -> float | None:
    """Returns the seconds that ORTModule took to export, build and load the training graph, summed over blocks.

    It is None before the first forward.
    """
    seconds = [_export_seconds(ort_module) for part in _parts(wrapped).values() for ort_module in part]
    known = [value for value in seconds if value is not None]
    return sum(known) if known else None


def export_origins(wrapped: torch.nn.Module) -> list[str]:
    """Returns the origin of each export: "hit" (from the cache), "stored", or "not stored: " and the reason.

    The origins of several blocks follow each other. The list is empty if the cache is off.
    """
    from ortlaunch.ort.module import cache

    ort_modules = [ort_module for part in _parts(wrapped).values() for ort_module in part]
    return [origin for ort_module in ort_modules for origin in cache.origins(ort_module)]


def close(wrapped: torch.nn.Module) -> None:
    """Ends ONNX Runtime's sessions and their threads while the interpreter and the process group still exist.

    The wrapped model cannot be trained afterwards.
    """
    for part in _parts(wrapped).values():
        for ort_module in filter(_trains, part):
            for training in (True, False):
                ort_module._torch_module._execution_manager(training)._execution_agent = None


def _parts(wrapped: torch.nn.Module) -> dict[str, list[Any]]:
    """Returns the ORTModules of each block by its path; the key of a whole model is ''."""
    if hasattr(wrapped, "_torch_module"):
        return {"": [wrapped]}
    from ortlaunch.ort.blocks import attached

    return {block.path: block.ort_modules for block in attached(wrapped)}


def _trains(ort_module: Any) -> bool:
    manager = training_manager(ort_module)
    return manager is not None and manager._execution_agent is not None


def _evaluates(ort_module: Any) -> bool:
    inner = ort_module._torch_module
    return hasattr(inner, "_execution_manager") and inner._execution_manager(False)._execution_agent is not None


def _fell_back(ort_module: Any) -> bool:
    return ort_module._fallback_manager._exception is not None


def _export_seconds(ort_module: Any) -> float | None:
    manager = training_manager(ort_module)
    if manager is None:
        return None
    from onnxruntime.training.ortmodule._logger import ORTModuleInitPhase, TimeTracker

    seconds = manager.time_tracker._get_duration(ORTModuleInitPhase.EndToEnd)
    return None if seconds == TimeTracker.NOT_RECORD else float(seconds)


def _prepare(
    model: torch.nn.Module, cfg: OrtConfig, threads: int, onnx_dir: Path | None, *, arena: bool
) -> Callable[[torch.nn.Module, str], torch.nn.Module]:
    """Configures ORTModule for this process and `model`.

    Returns:
        A function that wraps the model or a part of it; its second argument distinguishes the files.

    Raises:
        RequestError: the model is on CUDA and ONNX Runtime cannot run there.
    """
    if any(parameter.is_cuda for parameter in model.parameters()):
        cuda_libs.require()
    ortmodule = import_ortmodule()
    # These imports need torch's exporter where the compatibility layer has just put it.
    from ortlaunch.ort.kernels import executor, gradient_graph
    from ortlaunch.ort.kernels import symbolics as kernels
    from ortlaunch.ort.module import cache, guard, steps
    from ortlaunch.ort.module import install as mends
    from ortlaunch.ort.operators import forms, symbolics, torch_nodes

    torch_kernels = cfg.torch_kernels and next(model.parameters()).device.type == "cpu"
    mends.install()
    guard.note(model)
    kernels.register_gradients()
    torch_nodes.register_gradients()
    forms.register_gradients()
    compiled = extension.load_kernels() if torch_kernels else None
    if compiled is not None:
        executor.install(compiled)
        mends.over_training_graphs(gradient_graph.simplify, device="cpu", priority=0)
        kernels.fuse_gelu(model)
    else:
        kernels.disable()
    _set_fallback_policy(ortmodule, cfg.fallback)
    _set_session_options(cfg.threads or threads, cfg.spinning, arena)
    save_path = onnx_dir if cfg.debug.save_onnx else None
    if save_path is not None:
        save_path.mkdir(parents=True, exist_ok=True)

    def make(module: torch.nn.Module, part: str) -> torch.nn.Module:
        options = ortmodule.DebugOptions(
            log_level=ortmodule.LogLevel[_ORT_LEVEL[cfg.debug.log_level.value]],
            save_onnx=save_path is not None,
            onnx_prefix=f"{cfg.debug.onnx_prefix}_{part}" if part else cfg.debug.onnx_prefix,
            save_path=str(save_path or ""),
        )
        with modes.kept(module), modes.only_set(module):
            wrapped: torch.nn.Module = ortmodule.ORTModule(module, options)
        _open_one_session(wrapped)
        _gather_in_place(wrapped)
        # Every constructor registers ORTModule's own symbolics, so ours come after it. The first forward exports.
        symbolics.register()
        if torch_kernels:
            kernels.enable()
        # Blocks are for ZeRO 3, which frees their parameters between steps.
        if compiled is not None and not part:
            steps.enable(wrapped, compiled)
        if cfg.export_cache:
            cache.enable(wrapped)
        return wrapped

    return make


def _open_one_session(wrapped: torch.nn.Module) -> None:
    """Keeps an ORTModule from opening each training session twice.

    The first one would only tell how much memory each recomputation saves: sympy simplifies these amounts, and a log at
    level info shows them. The memory optimizer needs them where it chooses what to recompute.
    """
    from onnxruntime.training.ortmodule._logger import LogLevel
    from onnxruntime.training.ortmodule.options import _MemoryOptimizationLevel

    manager = training_manager(wrapped)
    if manager is None:
        return
    chooses = manager._runtime_options.memory_optimization_level != _MemoryOptimizationLevel.USER_SPECIFIED
    if not chooses and manager._debug_options.logging.log_level >= LogLevel.WARNING:
        manager._runtime_inspector.memory_ob._is_enabled = False


def _gather_in_place(wrapped: torch.nn.Module) -> None:
    """Keeps onnxruntime 1.19.2 from taking parts of a tensor before the operators that it is computed by.

    After ``(a @ b)[..., 0]`` a further part of one element gets another rank, and the session does not open, or the
    process dies. Our calls of PyTorch end such a way up, so that graphs of transformers are the same without it.
    """
    if (manager := training_manager(wrapped)) is not None:
        manager._runtime_options.enable_compute_optimizer = False


@contextlib.contextmanager
def _variable(name: str, value: str | None) -> Iterator[None]:
    """Sets an environment variable, or removes it, and restores it at the end."""
    before = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def plain_model(wrapped: torch.nn.Module) -> torch.nn.Module:
    """Returns the model inside an ORTModule; it shares weights and buffers and runs in PyTorch."""
    plain = wrapped.module
    assert isinstance(plain, torch.nn.Module)
    return plain


def training_manager(wrapped: torch.nn.Module) -> Any | None:
    """Returns ORTModule's manager of the training graph and its session; None after a fallback at construction."""
    inner: Any = wrapped._torch_module
    # After a fallback at construction, the inner module is ORT's plain PyTorch module, which has no manager.
    return inner._execution_manager(True) if hasattr(inner, "_execution_manager") else None


def traced_rates(wrapped: torch.nn.Module) -> list[float]:
    """Returns the rates of dropout in the trace of an ORTModule's training graph, in the order of its calls."""
    manager = training_manager(wrapped)
    info = manager and manager._graph_transition_manager._exported_model_info
    return list(info.module_forward_output_schema.rates) if info is not None else []


def _set_fallback_policy(ortmodule: Any, fallback: Fallback) -> None:
    from onnxruntime.training.ortmodule._fallback import _FallbackPolicy

    if fallback is Fallback.error:
        ortmodule.ORTMODULE_FALLBACK_POLICY = _FallbackPolicy.FALLBACK_DISABLE
        return
    ortmodule.ORTMODULE_FALLBACK_POLICY = (
        _FallbackPolicy.FALLBACK_UNSUPPORTED_DEVICE
        | _FallbackPolicy.FALLBACK_UNSUPPORTED_DATA
        | _FallbackPolicy.FALLBACK_UNSUPPORTED_TORCH_MODEL
        | _FallbackPolicy.FALLBACK_UNSUPPORTED_ONNX_MODEL
    )


def _set_session_options(threads: int, spinning: bool, arena: bool) -> None:
    """Sets the number of threads and, on the CPU, the arena of all sessions that this process opens from now on.

    ORTModule has no public option for them. By default each worker's session uses all cores of the machine, and its
    idle threads spin.
    """
    from onnxruntime.training.ortmodule._graph_execution_manager import GraphExecutionManager

    original = getattr(GraphExecutionManager, "_ortlaunch_original", GraphExecutionManager._get_session_config)

    def configured(manager: Any) -> Any:
        options, providers, provider_options = original(manager)
        options.intra_op_num_threads = threads
        options.enable_cpu_mem_arena = arena
        options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spinning else "0")
        return options, providers, provider_options

    GraphExecutionManager._ortlaunch_original = original
    GraphExecutionManager._get_session_config = configured
