"""What a run takes of a machine at the least, by its configuration alone: nothing is built, so that a form can ask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ortlaunch.config.devices import resolve_device
from ortlaunch.config.schema import Config, Device, RunConfig
from ortlaunch.launch.launcher import QueueLauncher
from ortlaunch.launch.table import launcher_of

_GIB = 1 << 30
_WORKER, _LOADER = _GIB // 2, _GIB // 8
"""Bytes of a process that trains, and of one that reads data, without the model and its batches."""
_NUMBER = 4
"""Bytes of a weight, and of an activation in the least of cases that a CPU has."""
_TRAINED = 4
"""Numbers of each weight in training: itself, its gradient, and two of the optimizer."""
_STORED = 3
"""Numbers of each weight in a checkpoint."""
_SHARING = ("fsdp", "deepspeed")
"""Trainers that spread the weights over the workers; others give all of them to each."""


def needs_of(config: RunConfig) -> dict[str, float]:
    """Returns the ``cores``, and the bytes of ``memory`` and ``disk``, that a run takes of this machine at least.

    Args:
        config: the configuration. A scheduler's job takes nothing of this machine.
    """
    launcher = launcher_of(config)
    if isinstance(launcher, QueueLauncher):
        return {}
    workers = launcher.workers_per_node(config)
    if not isinstance(config, Config):
        # What a script loads is its own.
        return {"cores": workers * (config.launcher.threads or 1), "memory": workers * _WORKER, "disk": 0.0}
    processes = workers * (_WORKER + config.data.workers * _LOADER)
    weights, of_sample = _weights(config.model.params), _numbers_of_sample(config)
    batches = workers * config.train.batch_size * of_sample * _NUMBER
    # On a GPU the host has the weights only while they are loaded, and the batches before they go there.
    held = weights * _NUMBER * (1 if resolve_device(config.device) is Device.cuda else _TRAINED)
    memory = processes + held * (1 if config.trainer.name in _SHARING else workers) + batches
    return {
        "cores": workers * (config.launcher.threads or 1),
        "memory": memory,
        "disk": _checkpoints(config) * weights * _STORED * _NUMBER,
    }


def _weights(params: Mapping[str, Any]) -> float:
    """The weights of a model that is told by sizes such as ours and transformers': 0 for any other."""
    width = _size(params, "n_embd", "hidden_size", "hidden_dim")
    ends = sum(_size(params, name) for name in ("vocab_size", "n_positions", "max_position_embeddings"))
    ends += sum(_size(params, name) for name in ("input_dim", "output_dim"))
    layers = _size(params, "n_layer", "num_hidden_layers")
    inner = _size(params, "intermediate_size") or 4 * width
    return width * (ends + layers * (4 * width + 2 * inner))


def _numbers_of_sample(config: Config) -> float:
    params = config.model.params
    width, layers = _size(params, "n_embd", "hidden_size"), _size(params, "n_layer", "num_hidden_layers")
    if not (tokens := getattr(config.data, "seq_len", 0)):
        return max(_size(params, "input_dim"), width, 1)
    if resolve_device(config.device) is Device.cuda:
        return 2.0 * tokens
    return float(tokens) * (_size(params, "vocab_size") + layers * width)


def _checkpoints(config: Config) -> float:
    every = config.train.checkpoint_every
    if not isinstance(every, int):
        return 1.0 if every is None else float(config.train.keep_checkpoints)
    return float(min(config.train.keep_checkpoints, max(1, config.train.steps // every)))


def _size(params: Mapping[str, Any], *names: str) -> float:
    found = (params.get(name) for name in names)
    return float(next((value for value in found if isinstance(value, int | float) and value > 0), 0))
