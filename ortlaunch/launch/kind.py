"""What the speed of a run depends on: the facts that make two runs be of one kind."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
from typing import Any

import ortlaunch
from ortlaunch.config.devices import device_name, resolve_device, usable_cores
from ortlaunch.config.load import to_dict
from ortlaunch.config.schema import Config
from ortlaunch.launch.table import launcher_of
from ortlaunch.launch.torchrun import threads_per_worker
from ortlaunch.models.registry import digests

_OF_TRAIN = (
    *("batch_size", "grad_accumulation", "precision", "clip_grad_norm", "activation_checkpointing"),
    *("deterministic", "tf32", "gc_every", "ema", "step"),
)
"""The keys of the training node that a step's time depends on."""
_ELSEWHERE = ("path", "tokenizer", "timeout_seconds")
"""Keys that say where data is, or how long to wait for others."""
_PACKAGES = ("torch", "onnxruntime-training", "onnxruntime-training-cpu", "deepspeed", "transformers")


def kind_of(config: Config) -> dict[str, Any]:
    """What the speed of a run depends on apart from its backend, as plain values.

    Args:
        config: the run's configuration, on the machine that runs it, or the first one of several.
    """
    plain = to_dict(config)
    device, workers = resolve_device(config.device), launcher_of(config).workers_per_node(config)
    threads = threads_per_worker(config, workers, usable_cores())
    return {
        "model": config.model.target or config.model.name,
        "params": plain["model"]["params"],
        "sources": digests(config.model),
        "data": {key: value for key, value in plain["data"].items() if key not in _ELSEWHERE},
        "train": {key: plain["train"][key] for key in _OF_TRAIN},
        "trainer": {key: value for key, value in plain["trainer"].items() if key not in _ELSEWHERE},
        "optimizer": config.optimizer.state_facts(),
        "workers": [workers, config.launcher.nodes, threads, config.launcher.allocator.value],
        "machine": [device.value, device_name(device), usable_cores()],
        "versions": [platform.python_version(), ortlaunch.__version__, *_versions()],
    }


@functools.cache
def _versions() -> tuple[str, ...]:
    return tuple(filter(None, map(_version, _PACKAGES)))


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return ""
