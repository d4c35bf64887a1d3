"""The peak memory of one worker: of the process, or of the device on CUDA."""

from __future__ import annotations

import resource

import torch

GIB = 1024.0**3


def peak_memory_gib(device: torch.device) -> float:
    """Returns the worker's peak memory in GiB: allocated on the GPU, or resident in RAM on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    # Linux reports ru_maxrss in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0 / GIB
