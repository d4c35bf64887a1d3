"""Makes ``copy.deepcopy`` and pickling of an ORTModule work, which fail with ORT's own support on the CPU.

ORTModule itself runs a copy of the model before it traces it. A hook that keeps something in the original model, of
which it is a closure, does so in the copy too, and the copy's forward fails: then the original is run.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.models import modes
from ortlaunch.ort.kernels import symbolics as kernels
from ortlaunch.ort.operators import symbolics


def install() -> None:
    """Makes ORTModules copyable; repeated calls do nothing."""
    from onnxruntime.training.ortmodule import ORTModule, _io

    ORTModule.__deepcopy__ = _deepcopy
    ORTModule.__reduce__ = _reduce
    if hasattr(_io, "_ortlaunch_outputs"):
        return
    original = _io.parse_outputs_for_onnx_export_and_extract_schema

    def outputs(module: Any, flatten_args: Any, logger: Any, clone_module: bool) -> Any:
        try:
            return original(module, flatten_args, logger, clone_module)
        except RequestError:
            raise
        except Exception:
            if not clone_module:
                raise
        return original(module, flatten_args, logger, False)

    _io.parse_outputs_for_onnx_export_and_extract_schema = _io._ortlaunch_outputs = outputs


def _deepcopy(wrapped: Any, memo: dict[int, Any]) -> Any:
    """Returns another ORTModule around a copy of the model; it exports again at its first forward."""
    duplicate = _wrapped(type(wrapped), copy.deepcopy(wrapped.module, memo), _debug_options(wrapped))
    memo[id(wrapped)] = duplicate
    return duplicate


def _reduce(wrapped: Any) -> tuple[Any, ...]:
    """Pickles the model inside and the options; ORT's own state has parts that exist on a GPU only."""
    return _unpickled, (wrapped.module, _debug_options(wrapped))


def _unpickled(model: torch.nn.Module, debug_options: Any) -> Any:
    """Returns an ORTModule around a model that was pickled; it exports again at its first forward.

    Raises:
        RequestError: this process has not wrapped a model before, so ORTModule is not corrected in it.
    """
    if not _is_installed():
        raise RequestError(
            "this model was pickled under backend=ort, which this process does not use: save the state_dict of the "
            "model, or pickle the model inside, which the attribute `module` of the wrapped one is"
        )
    from onnxruntime.training.ortmodule import ORTModule

    return _wrapped(ORTModule, model, debug_options)


def _is_installed() -> bool:
    package = sys.modules.get("onnxruntime.training.ortmodule")
    return getattr(getattr(package, "ORTModule", None), "__reduce__", None) is _reduce


def _debug_options(wrapped: Any) -> Any:
    """Returns the options for logs and saved graphs; None after a fallback, where there is no graph to save."""
    inner = wrapped._torch_module
    return inner._execution_manager(True)._debug_options if hasattr(inner, "_execution_manager") else None


def _wrapped(cls: type[Any], model: torch.nn.Module, debug_options: Any) -> Any:
    with modes.kept(model):
        wrapped = cls(model, debug_options)
    symbolics.register()
    kernels.restore()
    return wrapped
