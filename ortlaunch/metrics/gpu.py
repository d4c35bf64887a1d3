"""What NVML says about one GPU. Without the package nvidia-ml-py, a driver, or a right to ask there is nothing."""

from __future__ import annotations

import importlib
from typing import Any

_MIB = 1024.0**2
_SLOWED = 0x8 | 0x20 | 0x40 | 0x80
"""NVML's reasons for lower clocks that are no choice: hardware slowdown, software and hardware thermal slowdown, power
brake. Not the power cap, which a GPU under full load is often held at."""

FIELDS = ("utilization_percentage", "memory_usage_percentage", "memory_usage_megabytes", "power_usage_watts")
"""MLflow's names of the figures, behind ``gpu_<index>_``."""


class Gpu:
    """One GPU, as the driver counts them."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self.index = int(nvml.nvmlDeviceGetIndex(handle))
        """Its number on its machine, whatever this process may see of them."""

    def read(self) -> list[float]:
        """The figures of `FIELDS`; NaN for one that this GPU does not tell."""
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
        """Whether heat or a lack of power holds its clocks down; None where it does not tell."""
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
            # Older drivers and packages lack some functions, and some GPUs (MIG) some figures.
            return None


def find_gpu(uuid: str) -> Gpu | None:
    """The GPU with a CUDA device's UUID; None where NVML cannot be asked."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        return Gpu(nvml, nvml.nvmlDeviceGetHandleByUUID(name))
    except Exception:
        return None
