"""ORTModule the way ortlaunch runs it: no silent fallback, its share of the cores, and answers about what happened."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ortlaunch.config.schema import Fallback, OrtConfig
from ortlaunch.ort import compat, extension

_ORT_LEVEL = {"verbose": "VERBOSE", "info": "INFO", "warning": "WARNING", "error": "ERROR", "fatal": "FATAL"}


def import_ortmodule() -> Any:
    """Imports ``onnxruntime.training.ortmodule`` on this torch, with its extensions from the user's cache.

    Returns:
        The module.

    Raises:
        RequestError: onnxruntime-training is not installed, or its extension cannot be built.
    """
    # ORTModule lets these environment variables override what its caller asked for, in silence.
    for variable in ("ORTMODULE_FALLBACK_POLICY", "ORTMODULE_FALLBACK_RETRY", "ORTMODULE_LOG_LEVEL"):
        os.environ.pop(variable, None)
    compat.before_import()
    extension.load("aten_op_executor")
    if compat.supports_custom_autograd():
        extension.load("torch_interop_utils")
    from onnxruntime.training import ortmodule

    # Set because no library lies in ORTModule's own folder; ours are loaded already.
    ortmodule._FALLBACK_INIT_EXCEPTION = None
    compat.after_import()
    return ortmodule


def wrap(model: torch.nn.Module, cfg: OrtConfig, *, threads: int, onnx_dir: Path) -> torch.nn.Module:
    """Puts `model` into an ORTModule.

    Args:
        model: the plain model, already on its device.
        cfg: the backend's configuration.
        threads: the worker's share of the cores, for ONNX Runtime's pool where ``backend.threads`` is not set.
        onnx_dir: folder for ``backend.debug.save_onnx``; made when needed.
    """
    ortmodule = import_ortmodule()
    from ortlaunch.ort import mends, modes

    mends.install()
    _set_fallback_policy(ortmodule, cfg.fallback)
    _set_session_threads(cfg.threads or threads, cfg.spinning)
    if cfg.debug.save_onnx:
        onnx_dir.mkdir(parents=True, exist_ok=True)
    options = ortmodule.DebugOptions(
        log_level=ortmodule.LogLevel[_ORT_LEVEL[cfg.debug.log_level.value]],
        save_onnx=cfg.debug.save_onnx,
        onnx_prefix=cfg.debug.onnx_prefix,
        save_path=str(onnx_dir) if cfg.debug.save_onnx else "",
    )
    with modes.kept(model):
        wrapped: torch.nn.Module = ortmodule.ORTModule(model, options)
    return wrapped


def is_active(wrapped: torch.nn.Module) -> bool:
    """Whether the training forward of this ORTModule really ran on ONNX Runtime and did not fall back since."""
    manager = _training_manager(wrapped)
    return manager is not None and manager._execution_agent is not None and not manager._fallback_manager.is_pending()


def fallback_reason(wrapped: torch.nn.Module) -> str | None:
    """First line of the exception that made this ORTModule fall back to PyTorch; None where it did not."""
    pending = wrapped._fallback_manager._exception  # type: ignore[union-attr]
    if pending is None:
        return None
    lines = [line.strip() for line in str(pending).splitlines() if line.strip()]
    return lines[0] if lines else type(pending).__name__


def export_seconds(wrapped: torch.nn.Module) -> float | None:
    """Seconds that ORTModule took to export, build and open the training graph; None before the first forward."""
    manager = _training_manager(wrapped)
    if manager is None:
        return None
    from onnxruntime.training.ortmodule._logger import ORTModuleInitPhase, TimeTracker

    seconds = manager.time_tracker._get_duration(ORTModuleInitPhase.EndToEnd)
    return None if seconds == TimeTracker.NOT_RECORD else float(seconds)


def _training_manager(wrapped: torch.nn.Module) -> Any | None:
    inner: Any = wrapped._torch_module
    # After a fallback at construction the inner module is ORT's plain PyTorch one, which has no manager.
    return inner._execution_manager(True) if hasattr(inner, "_execution_manager") else None


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


def _set_session_threads(threads: int, spinning: bool) -> None:
    """Gives every session of this process `threads` threads; ORTModule has no public option for it.

    Left alone, each worker's session takes all cores of the machine and its idle threads spin.
    """
    from onnxruntime.training.ortmodule._graph_execution_manager import GraphExecutionManager

    original = getattr(GraphExecutionManager, "_ortlaunch_original", GraphExecutionManager._get_session_config)

    def with_threads(manager: Any) -> Any:
        options, providers, provider_options = original(manager)
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spinning else "0")
        return options, providers, provider_options

    GraphExecutionManager._ortlaunch_original = original
    GraphExecutionManager._get_session_config = with_threads
