"""The most memory that one worker held: the device's where there is CUDA, the process's own elsewhere."""

from __future__ import annotations

import resource

import torch

GIB = 1024.0**3


def peak_memory_gib(device: torch.device) -> float:
    """The most that this worker held at once, in GiB: allocated on the GPU, or resident in RAM on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    # Linux reports ru_maxrss in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0 / GIB
