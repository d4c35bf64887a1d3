"""The test before the training: all workers compare their software and measure their communication and computing.

It takes a few collectives, each of them once, whatever the number of nodes. Only workers import it.
"""

from __future__ import annotations

import importlib.metadata
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import ortlaunch
from ortlaunch.base.errors import TrainingError
from ortlaunch.run.run import Run
from ortlaunch.trainer.workers import Workers, values_of_all

_SLOW = 2.0
"""A node counts as slow when it needs this many times the median for the same work."""
_ROUNDS = 5


@dataclass(frozen=True)
class Findings:
    """The results, the same on every worker."""

    bandwidth_gb_per_second: float
    """Bus bandwidth of an all-reduce over all workers, 10^9 bytes."""
    reduced_mib: int
    slow: list[str]
    """Hosts that compute slowly, each with its figures."""


def meet(workers: Workers) -> Findings:
    """Compares the workers' software and measures their speed.

    Raises:
        TrainingError: they do not run the same software.
    """
    _compare()
    return Findings(*_all_reduce(workers), slow_hosts(_times(workers)))


def note(findings: Findings, workers: Workers, run_dir: Path) -> None:
    """The first worker journals the findings and names slow nodes."""
    if not workers.is_first:
        return
    bandwidth = f"{findings.bandwidth_gb_per_second:.3f}"
    tags = {"ortlaunch.preflight.all_reduce_gb_per_second": bandwidth}
    if findings.slow:
        tags["ortlaunch.preflight.slow_nodes"] = "; ".join(findings.slow)
    with Run(run_dir).journal() as journal:
        journal.tags(tags)
    print(f"preflight: all-reduce of {findings.reduced_mib} MiB over {workers.world_size} workers, {bandwidth} GB/s")
    for line in findings.slow:
        print(f"warning: {line}", flush=True)


def _compare() -> None:
    mine = f"{ortlaunch.__version__}, torch {torch.__version__}, onnxruntime {_onnxruntime()}"
    everyone = values_of_all((mine, _host()))
    others = sorted({f"{host}: ortlaunch {text}" for text, host in everyone if text != everyone[0][0]})
    if others:
        first = f"{everyone[0][1]}: ortlaunch {everyone[0][0]}"
        raise TrainingError("the nodes do not run the same software:\n" + "\n".join([first, *others[:16]]))


def _all_reduce(workers: Workers) -> tuple[float, int]:
    mib = 64 if workers.device.type == "cuda" else 4
    data = torch.ones(mib * 2**18, device=workers.device)
    dist.all_reduce(data)
    _finish(workers)
    begin = time.perf_counter()
    for _ in range(_ROUNDS):
        dist.all_reduce(data)
    _finish(workers)
    seconds = (time.perf_counter() - begin) / _ROUNDS
    # In a ring each byte crosses the bus 2 (n - 1) / n times.
    share = 2 * (workers.world_size - 1) / workers.world_size
    return share * mib * 2**20 / seconds / 1e9, mib


def _times(workers: Workers) -> list[tuple[str, float]]:
    size = 4096 if workers.device.type == "cuda" else 512
    matrix = torch.ones(size, size, device=workers.device)
    times = []
    for _ in range(_ROUNDS):
        _finish(workers)
        begin = time.perf_counter()
        matrix @ matrix
        _finish(workers)
        times.append(time.perf_counter() - begin)
    # The shortest of several times: a slow node is slow each time.
    return values_of_all((_host(), min(times)))


def slow_hosts(everyone: list[tuple[str, float]]) -> list[str]:
    """Hosts that take more than `_SLOW` times the median, each with its figure; its slowest worker counts.

    Args:
        everyone: each worker's host and its seconds for the same work.
    """
    # The lower median, so that one of two nodes can be slow.
    median = statistics.median_low(seconds for _, seconds in everyone)
    slow: dict[str, float] = {}
    for host, seconds in everyone:
        if seconds > _SLOW * median:
            slow[host] = max(seconds, slow.get(host, 0.0))
    return [f"{host} takes {seconds / median:.1f} times as long as the median" for host, seconds in slow.items()]


def _finish(workers: Workers) -> None:
    if workers.device.type == "cuda":
        torch.cuda.synchronize()


def _host() -> str:
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def _onnxruntime() -> str:
    for name in ("onnxruntime-training", "onnxruntime-training-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "none"
