"""The devices and cores of this machine, found without importing torch."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

from ortlaunch.config.schema import Device


def visible_gpus() -> int:
    """The number of NVIDIA GPUs that a process on this machine may use. ``CUDA_VISIBLE_DEVICES`` limits it."""
    present = _present_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or present == 0:
        return present
    # CUDA ignores the list from the first entry that names no device.
    count = 0
    for entry in visible.split(","):
        if entry.strip() in ("", "-1"):
            break
        count += 1
    return min(count, present)


def resolve_device(device: Device) -> Device:
    """Resolves `auto` to CUDA if this machine has a GPU, else to the CPU."""
    if device is Device.auto:
        return Device.cuda if visible_gpus() > 0 else Device.cpu
    return device


def usable_cores() -> int:
    """The number of CPU cores that this process may run on. It respects the limits of SLURM and containers."""
    return len(os.sched_getaffinity(0))


def device_name(device: Device) -> str:
    """The product name of this machine's first GPU, or of its processor."""
    if device is Device.cuda:
        return _nvidia_smi("--query-gpu=name", "--format=csv,noheader").partition("\n")[0].strip()
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith(("model name", "Model")):
                return " ".join(line.partition(":")[2].split())
    except OSError:
        pass
    # The kernel of some architectures does not name it.
    return platform.processor() or platform.machine()


def gpu_memory() -> int | None:
    """Bytes of each of this machine's GPUs, of the smallest one; None if there is none, or no answer."""
    listing = _nvidia_smi("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    found = [int(line) for line in listing.splitlines() if line.strip().isdigit()]
    return min(found) * 2**20 if found else None


def _present_gpus() -> int:
    driver = Path("/proc/driver/nvidia/gpus")
    if driver.is_dir():
        return sum(1 for _ in driver.iterdir())
    return sum(1 for line in _nvidia_smi("-L").splitlines() if line.startswith("GPU "))


def _nvidia_smi(*options: str) -> str:
    """What nvidia-smi prints; nothing where it is not installed or does not answer."""
    if shutil.which("nvidia-smi") is None:
        return ""
    try:
        return subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
