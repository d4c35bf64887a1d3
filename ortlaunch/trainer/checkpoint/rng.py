"""The state of one worker's random generators, as plain values that a file can hold."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch


def capture() -> dict[str, Any]:
    """The state of Python's, NumPy's and torch's generators, with CUDA's generator of this worker's device.

    ONNX Runtime does not expose its generator's state. Its generator is seeded from torch's at every run of a graph.
    """
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    state = {
        "python": [version, list(words), gauss],
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],  # type: ignore[union-attr]
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Sets the generators to a captured state."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
