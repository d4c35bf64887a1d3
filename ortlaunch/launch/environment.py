"""The environment of a run, as ``env.json`` in the run folder and some of the run's tags record it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import socket
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from ortlaunch.base.secrets import is_secret, without_secrets, without_secrets_in_words
from ortlaunch.launch.repository import Repository

_FIELD = re.compile(r"^(Name|Version): *(.+)$", re.MULTILINE)
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
_VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_DEVICE_ORDER",
    "CUDA_HOME",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES",
    "CONDA_DEFAULT_ENV",
    "CONDA_PREFIX",
    "GLIBC_TUNABLES",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "LANG",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "NVIDIA_TF32_OVERRIDE",
    "PYTHONHASHSEED",
    "PYTHONPATH",
    "TOKENIZERS_PARALLELISM",
    "VIRTUAL_ENV",
)
_PREFIXES = (
    *("DS_", "FI_", "GLOO_", "KMP_", "MALLOC_", "MKL_", "NCCL_", "OMP_", "ORTLAUNCH_", "ORTMODULE_"),
    *("PYTORCH_", "SLURM_", "TORCH_", "UCX_"),
)


def describe(arguments: list[str], repository: Repository | None = None) -> dict[str, Any]:
    """Returns the command, versions, host, commit and selected variables; never the whole environment.

    Args:
        arguments: the command line after ``ortlaunch``.
        repository: the repository that ortlaunch was started in, if any.
    """
    return {
        "command": without_secrets_in_words(["ortlaunch", *arguments]),
        "cwd": os.getcwd(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": sys.version.split()[0],
        "cores": len(os.sched_getaffinity(0)),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "git": repository.facts() if repository is not None else None,
        "variables": variables(),
    }


def variables(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the variables to record: those that change how or where a run computes, without secrets.

    Args:
        environment: the variables to select from; by default those of this process.
    """
    environment = os.environ if environment is None else environment
    return {
        name: without_secrets(value, environment)
        for name, value in sorted(environment.items())
        if (name in _VARIABLES or name.startswith(_PREFIXES)) and not is_secret(name)
    }


def slurm_variables() -> dict[str, str]:
    """Returns the variables that SLURM has set for this job; none outside of a job."""
    return {name: value for name, value in variables().items() if name.startswith("SLURM_")}


def packages() -> str:
    """Returns each installed package as ``name==version``, one per line, with its origin if it is not from an index."""
    return "".join(f"{line}\n" for line in _package_lines(importlib.metadata.distributions()))


def _package_lines(distributions: Iterable[importlib.metadata.Distribution]) -> list[str]:
    found: dict[str, str] = {}
    for distribution in distributions:
        try:
            text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
        except Exception:
            text = ""
        # A whole message's parser would take a tenth of a second for all packages.
        fields = dict(_FIELD.findall(text.partition("\n\n")[0]))
        # An interrupted installation has left a folder without them. Python imports the first distribution of a name.
        if fields.keys() == {"Name", "Version"} and fields["Name"].lower() not in found:
            found[fields["Name"].lower()] = f"{fields['Name']}=={fields['Version']}{_origin(distribution)}"
    return [found[name] for name in sorted(found)]


def _origin(distribution: importlib.metadata.Distribution) -> str:
    """Returns the folder or repository that a package was installed from; empty for a package from an index."""
    try:
        origin = json.loads(distribution.read_text("direct_url.json") or "")
        commit = origin.get("vcs_info", {}).get("commit_id")
        return without_secrets(f" @ {origin['url']}") + (f"@{commit}" if commit else "")
    except Exception:
        return ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
