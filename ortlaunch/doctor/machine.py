"""Checks the machine: disk space, shared memory, and SLURM if it is installed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ortlaunch.base.files import nearest_folder
from ortlaunch.base.user import user_cache
from ortlaunch.config.schema import Config
from ortlaunch.doctor.line import Level, Line
from ortlaunch.launch.slurm import programs

_GIB = 2**30
SHARED_MEMORY = Path("/dev/shm")
_LITTLE_SHARED = 256 * 2**20


def disk() -> Iterator[Line]:
    """Checks the space for run folders, compiled libraries and exported graphs."""
    for name, folder, little, soon in (
        (
            "disk of runs",
            Path(Config.run_root),
            "a checkpoint hardly fits",
            "a large model's checkpoints fill that soon",
        ),
        ("disk of the cache", user_cache(), "an exported graph hardly fits", "exported graphs fill that in time"),
    ):
        there = nearest_folder(folder)
        free = shutil.disk_usage(there).free / _GIB
        text = f"{free:.1f} GiB free for {folder.absolute()}"
        if not os.access(there, os.W_OK):
            yield Line(name, Level.error, f"{there} cannot be written", f"chown {os.getuid()} {there}")
        elif free < 1:
            yield Line(name, Level.error, f"{text}: {little}", f"du -xh {there} | sort -h")
        elif free < 10:
            yield Line(name, Level.warning, f"{text}: {soon}", f"du -xh {there} | sort -h")
        else:
            yield Line(name, Level.ok, text)


def shared_memory() -> Iterator[Line]:
    """Checks the shared memory, through which data loaders and NCCL pass tensors."""
    if not SHARED_MEMORY.is_dir():
        yield Line("shared memory", Level.warning, f"there is no {SHARED_MEMORY}: data.workers and NCCL need it")
        return
    free = shutil.disk_usage(SHARED_MEMORY).free
    text = f"{free / _GIB:.2f} GiB free in {SHARED_MEMORY}"
    if free < _LITTLE_SHARED:
        fix = f"mount -o remount,size=1g {SHARED_MEMORY}"
        yield Line("shared memory", Level.warning, f"{text}; in Docker give --shm-size=1g", fix)
    else:
        yield Line("shared memory", Level.ok, text)


def slurm() -> Iterator[Line]:
    """Checks SLURM's commands, and whether a controller answers."""
    if not programs.is_here("sbatch"):
        yield Line("slurm", Level.ok, "not on this machine: launcher=slurm needs it, or launcher.dry_run=true")
        return
    version = _said("sbatch", "--version")
    if not version.startswith("slurm"):
        text = "installed, but this machine belongs to no cluster; only launcher=slurm needs one"
        yield Line("slurm", Level.warning, text, "sinfo")
    elif " UP" in (answer := _said("scontrol", "ping")):
        yield Line("slurm", Level.ok, f"{version}, its controller answers")
    else:
        text = f"{version}, its controller does not answer: {answer}"
        yield Line("slurm", Level.warning, text, "sinfo")


def _said(program: str, *words: str) -> str:
    answer = programs.call(program, *words)
    return answer.problem or " ".join((answer.text or answer.said).split()[:12])
