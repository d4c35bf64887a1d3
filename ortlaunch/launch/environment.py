"""What surrounded a run: written to ``env.json`` in the run folder and, in part, to its tags."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from typing import Any

_PACKAGES = (
    "ortlaunch",
    "torch",
    "onnxruntime-training",
    "onnxruntime-training-cpu",
    "onnx",
    "deepspeed",
    "transformers",
    "mlflow",
    "hydra-core",
    "omegaconf",
    "numpy",
)
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "PYTHONPATH", "VIRTUAL_ENV")
_PREFIXES = ("GLOO_", "NCCL_", "ORTLAUNCH_", "ORTMODULE_", "SLURM_JOB_", "SLURM_NNODES", "TORCH_")


def describe(arguments: list[str]) -> dict[str, Any]:
    """The command, versions, host, commit and the variables that matter; never the whole environment.

    Args:
        arguments: the command line after ``ortlaunch``.
    """
    return {
        "command": ["ortlaunch", *arguments],
        "cwd": os.getcwd(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": sys.version.split()[0],
        "cores": len(os.sched_getaffinity(0)),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "git": git_state(),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name in _VARIABLES or name.startswith(_PREFIXES)
        },
    }


def git_state() -> dict[str, Any] | None:
    """Commit of the folder that ortlaunch was started in and whether it has changes; None outside a repository."""
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "dirty": bool(_git("status", "--porcelain", "--untracked-files=no"))}


def _git(*arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
