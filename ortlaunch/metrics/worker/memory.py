"""Memory of one worker: of the process, and of the device on CUDA."""

from __future__ import annotations

import psutil
import torch

from ortlaunch.metrics.at_log_steps import measured_by_every_worker
from ortlaunch.metrics.memory import GIB


@measured_by_every_worker("memory")
def memory_metrics(device: torch.device) -> dict[str, float]:
    """Returns the current and the peak memory of this worker in GiB, by MLflow metric name."""
    metrics = {"memory/rss_gib": psutil.Process().memory_info().rss / GIB}
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        metrics |= {
            "memory/peak_allocated_gib": torch.cuda.max_memory_allocated(device) / GIB,
            "memory/peak_reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
            "memory/alloc_retries": float(stats.get("num_alloc_retries", 0)),
            "memory/ooms": float(stats.get("num_ooms", 0)),
        }
    return metrics
