"""Imports onnxruntime quietly, for commands whose own process prints for a user.

onnxruntime-training imports DeepSpeed if it is installed, and DeepSpeed's autotuner MLflow. Nothing here needs either,
and together they take more than two seconds. A part of torch that onnxruntime-training imports prints a message on a
machine with CUDA's toolkit and without a GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import io

from ortlaunch.base.modules import hidden

with contextlib.redirect_stderr(io.StringIO()):
    importlib.import_module("torch.utils.cpp_extension")

with hidden("mlflow"), hidden("deepspeed"):
    import onnxruntime

__all__ = ["onnxruntime"]
