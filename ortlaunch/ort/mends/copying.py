"""Makes ``copy.deepcopy`` of an ORTModule work, which fails with ORT's own pickling support."""

from __future__ import annotations

import copy
from typing import Any

from ortlaunch.ort.kernels import symbolics as kernels
from ortlaunch.ort.mends import modes, symbolics


def install() -> None:
    """Makes ORTModules copyable; repeated calls do nothing."""
    from onnxruntime.training.ortmodule import ORTModule

    ORTModule.__deepcopy__ = _deepcopy


def _deepcopy(wrapped: Any, memo: dict[int, Any]) -> Any:
    """Returns another ORTModule around a copy of the model; it exports again at its first forward."""
    model = copy.deepcopy(wrapped.module, memo)
    inner = wrapped._torch_module
    # After a fallback there is no manager, and no graph to save.
    manager = inner._execution_manager(True) if hasattr(inner, "_execution_manager") else None
    with modes.kept(model):
        duplicate = type(wrapped)(model, None if manager is None else manager._debug_options)
    symbolics.register()
    kernels.restore()
    memo[id(wrapped)] = duplicate
    return duplicate
