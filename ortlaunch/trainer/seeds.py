"""Random numbers of one worker."""

from __future__ import annotations

import random

import numpy
import torch


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and torch; also ONNX Runtime once it is imported, which then follows torch."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
