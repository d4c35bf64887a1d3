"""The machines of a run: which worker runs on which machine, and the metric names of their samples."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ortlaunch.metrics.gpu import FIELDS as GPU_FIELDS
from ortlaunch.metrics.system import NODE_FIELDS

MOST_NODES = 16
"""With more machines, only the smallest, mean and largest value over all of them get a metric name."""
_MEGABYTES_PER_GIB = 1024.0**3 / 1e6


@dataclass(frozen=True)
class WorkerLocation:
    """The machine and GPU of a worker."""

    node: int
    """Number of the machine."""
    host: str
    gpu: int | None = None
    """Number of the GPU on the machine, if NVML reports it."""


class Nodes:
    """The machines of a run in the order of their numbers."""

    def __init__(self, places: Sequence[WorkerLocation]) -> None:
        self._places = places
        ranks: dict[int, list[int]] = {}
        for rank, place in enumerate(places):
            ranks.setdefault(place.node, []).append(rank)
        self._ranks = dict(sorted(ranks.items()))
        self.hosts = [places[ranks[0]].host for ranks in self._ranks.values()]
        """Host names of the machines."""

    @property
    def keys(self) -> list[str]:
        """Unique parts of metric names for the machines."""
        names = [re.sub(r"[^\w.-]", "_", host) for host in self.hosts]
        return [
            f"{name}-{number}" if names.count(name) > 1 else name
            for name, number in zip(names, self._ranks, strict=True)
        ]

    def host_of(self, rank: int) -> str:
        """Returns the host name of a worker's machine."""
        return self._places[rank].host

    def metrics(self, rows: Sequence[Sequence[float]], rss_gib: Sequence[float]) -> dict[str, float]:
        """Returns samples by MLflow metric name, without those that were not taken.

        Args:
            rows: for each worker, the result of its `Sampler.window`.
            rss_gib: for each worker, its resident memory.
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
    """Returns the smallest, mean and largest value of each figure; the figures of all GPUs are combined."""
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
