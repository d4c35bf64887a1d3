"""Reads figures of one GPU from NVML; there are none without nvidia-ml-py, a driver or the permission."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

_MIB = 1024.0**2
_SLOWED = 0x8 | 0x20 | 0x40 | 0x80
"""NVML's reasons for clocks that are lowered by a fault: hardware slowdown, software and hardware thermal slowdown,
power brake. The power cap is not among them, because it often limits a GPU under full load."""

FIELDS = ("utilization_percentage", "memory_usage_percentage", "memory_usage_megabytes", "power_usage_watts")
"""MLflow's names of the figures, after the prefix ``gpu_<index>_``."""


class Gpu:
    """One GPU, as the driver numbers them."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self.index = int(nvml.nvmlDeviceGetIndex(handle))
        """Its number on the machine, independent of CUDA_VISIBLE_DEVICES."""

    def read(self) -> list[float]:
        """Returns the figures of `FIELDS`; NaN for a figure that this GPU does not report."""
        memory = self._ask("nvmlDeviceGetMemoryInfo")
        load = self._ask("nvmlDeviceGetUtilizationRates")
        power = self._ask("nvmlDeviceGetPowerUsage")
        unknown = float("nan")
        return [
            unknown if load is None else float(load.gpu),
            unknown if memory is None else 100.0 * memory.used / memory.total,
            unknown if memory is None else memory.used / _MIB,
            unknown if power is None else power / 1000.0,
        ]

    def is_slowed(self) -> bool | None:
        """Whether heat or a lack of power lowers the GPU's clocks; None if the GPU does not report it."""
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            if (reasons := self._ask(name)) is not None:
                return bool(int(reasons) & _SLOWED)
        return None

    @property
    def driver(self) -> str | None:
        """The driver's version."""
        try:
            found = self._nvml.nvmlSystemGetDriverVersion()
        except Exception:
            return None
        return found.decode() if isinstance(found, bytes) else str(found)

    def _ask(self, name: str) -> Any:
        try:
            return getattr(self._nvml, name)(self._handle)
        except Exception:
            # Older drivers and packages lack some functions, and some GPUs (MIG) do not report some figures.
            return None


def find_gpu(name: str | int) -> Gpu | None:
    """Returns the GPU with a CUDA device's UUID or the driver's number; None if NVML is not available."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        if isinstance(name, int):
            return Gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(name))
        uuid = name if name.startswith(("GPU-", "MIG-")) else f"GPU-{name}"
        return Gpu(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    except Exception:
        return None


def gpu_of_worker(variables: Mapping[str, str]) -> Gpu | None:
    """Returns the GPU of a worker of torchrun's with these variables: by convention, of those that it sees that of its
    local rank; None if it sees none."""
    rank = int(variables.get("LOCAL_RANK", "0"))
    seen = variables.get("CUDA_VISIBLE_DEVICES")
    if seen is None:
        return find_gpu(rank)
    names = [int(name) if name.strip().isdecimal() else name.strip() for name in seen.split(",") if name.strip()]
    return find_gpu(names[rank]) if rank < len(names) else None
