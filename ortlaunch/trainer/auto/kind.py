"""What a rate depends on: the facts that make two runs be of one kind."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
from typing import Any

import torch

import ortlaunch
from ortlaunch.config.devices import resolve_device
from ortlaunch.config.load import to_dict
from ortlaunch.config.schema import Config
from ortlaunch.models.source import digests
from ortlaunch.trainer.system_info import device_name

_OF_TRAIN = (
    *("batch_size", "grad_accumulation", "precision", "clip_grad_norm", "activation_checkpointing"),
    *("deterministic", "tf32", "gc_every"),
)
"""The keys of the training node that a step's time depends on."""
_ELSEWHERE = ("path", "tokenizer", "timeout_seconds")
"""Keys that say where data is, or how long to wait for others."""
_PACKAGES = ("torch", "onnxruntime-training", "onnxruntime-training-cpu", "deepspeed", "transformers")


def facts(config: Config, *, world_size: int, threads: int) -> dict[str, Any]:
    """What the rates of a run depend on, as plain values.

    Args:
        config: the run's configuration.
        world_size: workers on all machines.
        threads: threads of each worker.
    """
    plain = to_dict(config)
    device = resolve_device(config.device)
    return {
        "model": config.model.target or config.model.name,
        "params": plain["model"]["params"],
        "sources": digests(config.model),
        "data": {key: value for key, value in plain["data"].items() if key not in _ELSEWHERE},
        "train": {key: plain["train"][key] for key in _OF_TRAIN},
        "trainer": {key: value for key, value in plain["trainer"].items() if key not in _ELSEWHERE},
        "optimizer": config.optimizer.name,
        "workers": [world_size, config.launcher.nodes, threads, config.launcher.allocator.value],
        "machine": [device.value, device_name(torch.device(device.value)), len(os.sched_getaffinity(0))],
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
