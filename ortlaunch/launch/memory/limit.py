"""The memory of a machine that a run's workers share: this machine's, or what the run asks of SLURM."""

from __future__ import annotations

import re

from ortlaunch.base.errors import RequestError
from ortlaunch.base.free_memory import available
from ortlaunch.config.schema import Config, LocalConfig, SlurmConfig

_UNITS = {"": 2**20, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
HERE = "free on this machine"
"""Where the limit is from for runs on this machine."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B)?", re.IGNORECASE)


def parsed(text: str, key: str) -> int:
    """Bytes of a size such as 80GiB, 80G or 512M. As in SLURM, units are powers of 1024, and a bare number means MiB.

    Args:
        text: the size.
        key: the option or key that has it, for messages.

    Raises:
        RequestError: it is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise RequestError(f"{key}={text}: not a size of memory; write 80GiB or 512MiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def limit_of(config: Config) -> tuple[int | None, str]:
    """Bytes of each machine of the run, and where they are from; None if the configuration does not say."""
    launcher = config.launcher
    if isinstance(launcher, LocalConfig):
        return available(), HERE
    if isinstance(launcher, SlurmConfig) and launcher.memory not in (None, "0"):
        return parsed(str(launcher.memory), "launcher.memory"), "launcher.memory"
    return None, "not known: give launcher.memory or --memory"
