"""Seeds of one worker's random numbers, and deterministic algorithms."""

from __future__ import annotations

import os
import random
import sys

import numpy
import torch

from ortlaunch.trainer import vector_math


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy, torch and, if the process uses it, ONNX Runtime.

    Loaders have their own generators, which the run's seed determines. The vectorized functions are warmed up here,
    because reproducible results need that too and nothing is computed before.
    """
    vector_math.warm_up()
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if "onnxruntime" in sys.modules:
        from ortlaunch.ort import session

        session.set_seed(seed)


def make_deterministic() -> None:
    """Restricts torch to deterministic algorithms; an operation that has none raises an error.

    ORTModule reads torch's setting and applies it to ONNX Runtime.
    """
    # cuBLAS reads it when the process first uses cuBLAS.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
