"""Memory of one worker: of the process, and of the device on CUDA."""

from __future__ import annotations

import os

import torch

from ortlaunch.metrics.at_log_steps import measured_by_every_worker
from ortlaunch.metrics.memory import GIB

_PAGE = os.sysconf("SC_PAGE_SIZE")


@measured_by_every_worker("memory")
def memory_metrics(device: torch.device) -> dict[str, float]:
    """Returns the current and the peak memory of this worker in GiB, by MLflow metric name."""
    metrics = {"memory/rss_gib": _resident_bytes() / GIB}
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        metrics |= {
            "memory/peak_allocated_gib": torch.cuda.max_memory_allocated(device) / GIB,
            "memory/peak_reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
            "memory/alloc_retries": float(stats.get("num_alloc_retries", 0)),
            "memory/ooms": float(stats.get("num_ooms", 0)),
        }
    return metrics


def _resident_bytes() -> int:
    # All workers wait for this one meanwhile, and psutil reads further files for the same number.
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE
