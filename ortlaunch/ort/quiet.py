"""Imports onnxruntime quietly, for commands whose own process prints for a user.

onnxruntime-training imports DeepSpeed if it is installed. On a machine with CUDA's toolkit and without a GPU, DeepSpeed
imports a part of torch that prints a message about this. DeepSpeed's autotuner would also import MLflow, which takes
more than a second.
"""

from __future__ import annotations

import contextlib
import importlib
import io

from ortlaunch.base.modules import hidden

with contextlib.redirect_stderr(io.StringIO()):
    importlib.import_module("torch.utils.cpp_extension")

with hidden("mlflow"):
    import onnxruntime

__all__ = ["onnxruntime"]
