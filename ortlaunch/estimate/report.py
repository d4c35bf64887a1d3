"""What an estimate says, as plain values. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ortlaunch.config.schema import Config
from ortlaunch.estimate.band import NOTHING, Band, verdict
from ortlaunch.estimate.request import Request

_NEIGHBOURS = ("checkpointing_saves_bytes", "largest_batch_size", "largest_batch_is_all", "change")


def report(
    config: Config,
    request: Request,
    *,
    machine: Band,
    workers: Sequence[Mapping[str, Any]],
    method: str,
    note: str,
    tried: Sequence[int] | None = None,
    compilers: Band = NOTHING,
    loaders: Band = NOTHING,
    neighbours: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The report of a run.

    Args:
        config: its configuration.
        request: its size and its limit.
        machine: the memory of a machine, or of a GPU.
        workers: what is known of each worker of a machine.
        method: how it was found, in words.
        note: what else there is to say; empty for nothing.
        tried: the micro-batches of trials.
        compilers: the part of the machine's memory that torch.compile's compilers take.
        loaders: that of the processes which read data.
        neighbours: what could be changed about the run; None if that was not looked at.
    """
    return {
        "model": config.model.target or config.model.name,
        "backend": config.backend.name,
        "trainer": config.trainer.name,
        "precision": config.train.precision.value,
        "device": "cuda" if request.on_gpu else "cpu",
        "batch_size": config.train.batch_size,
        "world_size": request.world_size,
        "method": method,
        "probed_batch_sizes": None if tried is None else list(tried),
        "note": note,
        "workers": list(workers),
        "machine": {
            **machine.to_json(),
            "compilers_bytes": compilers.middle,
            "loaders_bytes": loaders.middle,
            "limit_bytes": request.limit,
            "limit_source": request.limit_source,
        },
        "verdict": verdict(machine, request.limit),
        **(dict.fromkeys(_NEIGHBOURS) if neighbours is None else neighbours),
    }
