"""The machines of a run: who is where, and what their samples are called."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ortlaunch.metrics.gpu import FIELDS as GPU_FIELDS
from ortlaunch.metrics.system import NODE_FIELDS

MOST_NODES = 16
"""More machines than these get no keys of their own but the least, mean and largest value over all of them."""
_MEGABYTES_PER_GIB = 1024.0**3 / 1e6


@dataclass(frozen=True)
class WorkerLocation:
    """Where a worker is; in the order of ranks."""

    node: int
    """Its machine's number."""
    host: str
    gpu: int | None = None
    """The number of its GPU on the machine, where NVML tells it."""


class Nodes:
    """The machines of a run in the order of their numbers."""

    def __init__(self, places: Sequence[WorkerLocation]) -> None:
        self._places = places
        ranks: dict[int, list[int]] = {}
        for rank, place in enumerate(places):
            ranks.setdefault(place.node, []).append(rank)
        self._ranks = dict(sorted(ranks.items()))
        self.hosts = [places[ranks[0]].host for ranks in self._ranks.values()]
        """Their names."""

    @property
    def keys(self) -> list[str]:
        """Their names as parts of a metric's name, each another one."""
        names = [re.sub(r"[^\w.-]", "_", host) for host in self.hosts]
        return [
            f"{name}-{number}" if names.count(name) > 1 else name
            for name, number in zip(names, self._ranks, strict=True)
        ]

    def host_of(self, rank: int) -> str:
        """The name of a worker's machine."""
        return self._places[rank].host

    def metrics(self, rows: Sequence[Sequence[float]], rss_gib: Sequence[float]) -> dict[str, float]:
        """Samples by MLflow metric name; only of what was sampled.

        Args:
            rows: of each worker what its `Sampler.window` gave.
            rss_gib: resident memory of each worker.
        """
        of_nodes = [self._of_node(ranks, rows, rss_gib) for ranks in self._ranks.values()]
        if len(of_nodes) <= MOST_NODES:
            named = zip(self.keys, of_nodes, strict=True)
            return {f"system/{node}/{name}": value for node, values in named for name, value in values.items()}
        return _spread(of_nodes)

    def _of_node(self, ranks: list[int], rows: Sequence[Sequence[float]], rss_gib: Sequence[float]) -> dict[str, float]:
        values: dict[str, float] = {}
        for rank in ranks:
            named = zip(NODE_FIELDS, rows[rank], strict=False)
            values |= {name: value for name, value in named if not math.isnan(value)}
            if (gpu := self._places[rank].gpu) is not None:
                fields = zip(GPU_FIELDS, rows[rank][len(NODE_FIELDS) :], strict=True)
                values |= {f"gpu_{gpu}_{name}": value for name, value in fields if not math.isnan(value)}
        if values:
            values["workers_rss_megabytes"] = sum(rss_gib[rank] for rank in ranks) * _MEGABYTES_PER_GIB
        return values


def _spread(of_nodes: list[dict[str, float]]) -> dict[str, float]:
    """The least, mean and largest value of each figure; those of all GPUs together."""
    everyone: dict[str, list[float]] = {}
    for values in of_nodes:
        for name, value in values.items():
            everyone.setdefault(re.sub(r"^gpu_\d+_", "gpu_", name), []).append(value)
    metrics: dict[str, float] = {}
    for name, found in everyone.items():
        metrics |= {
            f"system/min/{name}": min(found),
            f"system/mean/{name}": sum(found) / len(found),
            f"system/max/{name}": max(found),
        }
    return metrics
