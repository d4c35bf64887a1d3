"""Random numbers of one worker, and the same bits twice."""

from __future__ import annotations

import os
import random
import sys

import numpy
import torch

from ortlaunch.trainer import vector_math


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy, torch and, where the process uses it, ONNX Runtime.

    Loaders have generators of their own, made of the run's seed. Nothing is computed before it, so this is where the
    vectorized functions are warmed up, which the same bits need as well.
    """
    vector_math.warm_up()
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if "onnxruntime" in sys.modules:
        from ortlaunch.ort import session

        session.set_seed(seed)


def make_deterministic() -> None:
    """Has torch take only algorithms that give the same bits each time; it raises where an operation has none.

    ORTModule asks torch, and has ONNX Runtime do the same.
    """
    # Read by cuBLAS when it is first used in the process.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
