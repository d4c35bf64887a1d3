"""Sizes of memory as they are typed, and what a run may take: of this machine or its GPUs, or what it asks of SLURM."""

from __future__ import annotations

import re

from ortlaunch.base.errors import RequestError
from ortlaunch.base.free_memory import available
from ortlaunch.config.devices import gpu_memory, resolve_device
from ortlaunch.config.schema import Device, LocalConfig, RunConfig, SlurmConfig

_UNITS = {"": 2**20, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
HERE = "free on this machine"
"""Where the limit is from for runs on this machine."""
ON_GPU = "a GPU of this machine"
LEAST_BYTES = 200 * 2**20
"""A worker takes more than this before it has a model: torch 2.13 alone takes 220 MiB (measured)."""
_MOST_BYTES = 2**50
WHOLE_NODE = "0"
"""SLURM's word for all memory of a node."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B)?", re.IGNORECASE)


def parsed(text: str, key: str) -> int:
    """Bytes of a size such as 80GiB, 80G or 512M. As in SLURM, units are powers of 1024, and a bare number means MiB.

    Args:
        text: the size.
        key: the option or key that has it, for messages.

    Raises:
        RequestError: it is no size, or a bare number that is too small to be meant in MiB.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise RequestError(f"{key}={text}: not a size of memory; write 80GiB or 512MiB")
    wanted = float(match[1]) * _UNITS[match[2].upper()]
    if wanted > _MOST_BYTES:
        raise RequestError(f"{key}={text}: no machine has so much memory; write 80GiB or 512MiB")
    size = int(wanted)
    if size < LEAST_BYTES and not (match[2] or match[3]):
        raise RequestError(
            f"{key}={text}: a number without a unit is in MiB, and importing torch takes more than "
            f"{LEAST_BYTES // 2**20} MiB: write {text.strip()}G if you mean that"
        )
    return size


def limit_of(config: RunConfig) -> tuple[int | None, str]:
    """Bytes of each machine of the run, or of each of its GPUs, and where they are from; None if that is not known."""
    launcher = config.launcher
    if resolve_device(config.device) is Device.cuda:
        # What is in use now does not count: a run that waits in a queue starts when its GPUs are free.
        size = gpu_memory() if isinstance(launcher, LocalConfig) else None
        return (None, "not known: give --memory") if size is None else (size, ON_GPU)
    if isinstance(launcher, LocalConfig):
        return available(), HERE
    if isinstance(launcher, SlurmConfig) and launcher.memory not in (None, WHOLE_NODE):
        return parsed(str(launcher.memory), "launcher.memory"), "launcher.memory"
    return None, "not known: give launcher.memory or --memory"
