"""Lets ORTModule 1.19.2, the last release, import and export on a torch newer than it knows.

Each step tests for a feature, never for a version number, and changes nothing on a torch that ORTModule supports (2.4
to 2.6). These changes of torch break ORTModule:

* 2.7 hides the type information of ``torch::autograd::PyNode``: ORTModule's ``torch_interop_utils`` extension, which
  serves only custom ``autograd.Function``, can no longer be loaded. A stub replaces it, and the feature is off; simple
  Functions are still exported by inlining.
* 2.9 and later move the TorchScript exporter to ``torch.onnx._internal.torchscript_exporter`` and make the dynamo
  exporter the default of ``torch.onnx.export``.
* A build without CUDA raises from ``torch.cuda.nvtx``, which ORTModule calls on every step.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

_MOVED_EXPORTER = "torch.onnx._internal.torchscript_exporter"
_INTERNAL_MODULES = {"jit_utils", "registration", "onnx_proto_utils"}
_PY_NODE_TYPEINFO = "_ZTIN5torch8autograd6PyNodeE"
INTEROP_MODULE = "onnxruntime.training.ortmodule.torch_cpp_extensions.torch_interop_utils"


def before_import() -> list[str]:
    """Prepares torch for ``import onnxruntime.training.ortmodule``; each step runs at most once.

    Returns:
        The steps that this torch needed, in words; empty on a torch that ORTModule supports.
    """
    steps = []
    if exporter_has_moved():
        _restore_exporter_modules()
        steps.append("the ONNX exporter is taken from where it has moved to")
    if not supports_custom_autograd():
        sys.modules.setdefault(INTEROP_MODULE, _interop_stand_in())
        os.environ["ORTMODULE_ENABLE_CUSTOM_AUTOGRAD"] = "0"
        steps.append("an autograd.Function with a backward of its own is a call of PyTorch under backend=ort")
    if _nvtx_raises():
        torch.cuda.nvtx.range_push = _no_range  # type: ignore[assignment]
        torch.cuda.nvtx.range_pop = _no_range  # type: ignore[assignment]
        steps.append("marks for NVIDIA's profilers are left out")
    return steps


def after_import() -> None:
    """Makes ORTModule's exports, and only those, use the TorchScript exporter; needs ORTModule to be importable."""
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager

    if not _exports_with_dynamo() or hasattr(GraphTransitionManager, "_ortlaunch_export"):
        return
    original = GraphTransitionManager._get_exported_model

    def export(*args: Any, **kwargs: Any) -> Any:
        with torchscript_export():
            return original(*args, **kwargs)

    GraphTransitionManager._get_exported_model = staticmethod(export)
    GraphTransitionManager._ortlaunch_export = export


@contextlib.contextmanager
def torchscript_export() -> Iterator[None]:
    """Makes ``torch.onnx.export`` use the TorchScript exporter by default."""
    original = torch.onnx.export

    def export(*args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("dynamo", False)
        return original(*args, **kwargs)

    # ORTModule inspects the signature to find the arguments, so the replacement must have the original's.
    export.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    torch.onnx.export = export
    try:
        yield
    finally:
        torch.onnx.export = original


def exporter_has_moved() -> bool:
    """Whether this torch has its TorchScript exporter in another module than ORTModule expects."""
    return (
        importlib.util.find_spec("torch.onnx._internal.jit_utils") is None
        and importlib.util.find_spec(_MOVED_EXPORTER) is not None
    )


def supports_custom_autograd() -> bool:
    """Whether ``torch_interop_utils`` can be linked, which needs the exported type information of PyNode."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_python.so"
    if not library.is_file():
        return False
    try:
        ctypes.c_void_p.in_dll(ctypes.CDLL(str(library)), _PY_NODE_TYPEINFO)
    except ValueError:
        return False
    return True


def _restore_exporter_modules() -> None:
    moved = importlib.import_module(_MOVED_EXPORTER)
    for info in pkgutil.iter_modules(moved.__path__):
        old_parent = "torch.onnx._internal" if info.name in _INTERNAL_MODULES else "torch.onnx"
        if info.name == "verification":
            continue
        # Another package may have imported torch's module of the old name, which lacks what begins with a _.
        module = importlib.import_module(f"{_MOVED_EXPORTER}.{info.name}")
        sys.modules[f"{old_parent}.{info.name}"] = module
        setattr(importlib.import_module(old_parent), info.name, module)


def _interop_stand_in() -> types.ModuleType:
    module = types.ModuleType(INTEROP_MODULE, "Stands in for the extension that this torch cannot load.")

    def unavailable() -> None:
        raise RuntimeError("custom autograd.Function needs torch 2.6 or older under ORTModule")

    module.clear_all_grad_fns = lambda: None  # type: ignore[attr-defined]
    module.get_custom_function_forward_runner = unavailable  # type: ignore[attr-defined]
    module.get_custom_function_backward_runner = unavailable  # type: ignore[attr-defined]
    return module


def _nvtx_raises() -> bool:
    try:
        torch.cuda.nvtx.range_push("ortlaunch")
        torch.cuda.nvtx.range_pop()
    except RuntimeError:
        return True
    return False


def _no_range(*_args: object) -> int:
    return -1


def _exports_with_dynamo() -> bool:
    parameter = inspect.signature(torch.onnx.export).parameters.get("dynamo")
    return parameter is not None and parameter.default is not False
