"""onnxruntime for commands whose own process prints for a user.

onnxruntime-training imports DeepSpeed where that is installed, and DeepSpeed a part of torch which prints, on a machine
with CUDA's toolkit and without a GPU, that it has found the one and not the other.
"""

from __future__ import annotations

import contextlib
import importlib
import io

with contextlib.redirect_stderr(io.StringIO()):
    importlib.import_module("torch.utils.cpp_extension")

import onnxruntime

__all__ = ["onnxruntime"]
