"""Memory of one worker: of the process, and of the device on CUDA."""

from __future__ import annotations

import resource

import psutil
import torch

_GIB = 1024.0**3


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Returns the current and the peak memory of this worker in GiB, by MLflow metric name."""
    metrics = {"memory/rss_gib": psutil.Process().memory_info().rss / _GIB}
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        metrics |= {
            "memory/peak_allocated_gib": torch.cuda.max_memory_allocated(device) / _GIB,
            "memory/peak_reserved_gib": torch.cuda.max_memory_reserved(device) / _GIB,
            "memory/alloc_retries": float(stats.get("num_alloc_retries", 0)),
            "memory/ooms": float(stats.get("num_ooms", 0)),
        }
    return metrics


def peak_memory_gib(device: torch.device) -> float:
    """Returns the worker's peak memory in GiB: allocated on the GPU, or resident in RAM on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _GIB
    # Linux reports ru_maxrss in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0 / _GIB
