"""Lets ORTModule wrap a model whose forward is no method: a partial or a decorated function, set on the model itself.

ORTModule copies the signature of the function behind the method, which such a forward does not have.
"""

from __future__ import annotations

import types
from typing import Any


def install() -> None:
    """Makes ORTModule's constructor take such models; repeated calls do nothing."""
    from onnxruntime.training.ortmodule import _utils

    if hasattr(_utils, "_ortlaunch_patch"):
        return
    original = _utils.patch_torch_module_ort_forward_method

    def patch(torch_module: Any) -> None:
        if hasattr(torch_module._original_module.forward, "__func__"):
            original(torch_module)
            return

        def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
            return self._execution_manager(self.is_training()).forward(*inputs, **kwargs)

        torch_module.forward = types.MethodType(forward, torch_module)

    _utils.patch_torch_module_ort_forward_method = _utils._ortlaunch_patch = patch
