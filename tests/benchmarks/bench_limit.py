"""What share of this machine's arithmetic a run uses, under eager, torch.compile and ORT: ``make bench NAME=limit``.

The share is a run's model FLOP/s over the rate of a matrix product on as many threads as its workers have together.
FLOP/s are the operations that ortlaunch counts for forward and backward (`ortlaunch.metrics.flops`), over the median
step; the rate is measured in this process before and after each run, and each run is divided by the mean of both, so
that a machine whose speed drifts drifts in both. Of several sizes the fastest counts.

Runs have ortlaunch's defaults and two workers, the backends in turn, every other round the other way round. Of each
figure the table has the median of the rounds, and the least and the largest in brackets. A ratio above 1 means that
ORT is faster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from ortlaunch.trainer.system_info import device_name
from tests.benchmarks.figures import with_range
from tests.benchmarks.whole_runs import STEPS, WORKERS, leave_nothing_running, run, turns

BACKENDS = ("eager", "compile", "ort")
TRAINERS = ("ddp", "deepspeed")
SIZES = (384, 512, 768, 1024, 1536, 2048)
_SECONDS_PER_SIZE = 0.2

Shares = dict[str, float]
"""Of one round: the share of the machine's rate, by backend."""


def product_rate(threads: int) -> float:
    """Operations per second of the fastest fp32 product of two square matrices, on this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return max(_rate(size) for size in SIZES)
    finally:
        torch.set_num_threads(before)


def _rate(size: int) -> float:
    """The rate of one size, at the median product."""
    left, right, result = (torch.rand(size, size) for _ in range(3))
    torch.mm(left, right, out=result)
    seconds = []
    end = time.perf_counter() + _SECONDS_PER_SIZE
    while time.perf_counter() < end or len(seconds) < 3:
        begin = time.perf_counter()
        torch.mm(left, right, out=result)
        seconds.append(time.perf_counter() - begin)
    return 2 * size**3 / statistics.median(seconds)


def measure(model: str, trainer: str, rounds: int, threads: int, rates: list[float]) -> list[Shares]:
    """Rounds of shares; each measured rate is added to `rates`."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for order in turns(BACKENDS, rounds):
            shares = {}
            rates.append(product_rate(threads))
            for backend in order:
                achieved = _flops_per_second(model, trainer, backend, Path(folder))
                rates.append(product_rate(threads))
                shares[backend] = achieved / statistics.mean(rates[-2:])
            found.append(shares)
    return found


def _flops_per_second(model: str, trainer: str, backend: str, folder: Path) -> float:
    ran = run(
        f"model={model}",
        f"trainer={trainer}",
        f"train.steps={STEPS[model]}",
        f"launcher.workers_per_node={WORKERS}",
        "train.checkpoint_every=null",
        "train.save_weights=false",
        "device=cpu",
        f"name={model}",
        backend=backend,
        folder=folder,
    )
    return WORKERS * ran.flops_per_step / ran.step_seconds


def row(title: str, rounds: Sequence[Shares]) -> str:
    """A row of the table: a share for each backend in percent, and ORT over eager and over the better of the others."""
    shares = [with_range([100 * one[backend] for one in rounds]) for backend in BACKENDS]
    over_eager = [one["ort"] / one["eager"] for one in rounds]
    over_best = [one["ort"] / max(one["eager"], one["compile"]) for one in rounds]
    return " | ".join(["| " + title, *shares, with_range(over_eager), with_range(over_best)]) + " |"


def main() -> None:
    """Measures and prints."""
    options = _options()
    leave_nothing_running()
    # What the workers have together: each has its share of the cores.
    threads = max(1, len(os.sched_getaffinity(0)) // WORKERS) * WORKERS
    torch.set_num_threads(threads)
    rates: list[float] = []
    machine = f"{device_name(torch.device('cpu'))}, {WORKERS} workers with {threads // WORKERS} threads each"
    print(f"{machine}, {options.rounds} rounds; torch {torch.__version__}, Python {sys.version.split()[0]}\n")
    print("Model FLOP/s, % of the machine's matrix product: median (least to largest)\n")
    print("| case | eager | compile | ort | ort/eager | ort/better of both |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for trainer in options.trainers:
        for model in options.families:
            print(row(f"{model}, {trainer}", measure(model, trainer, options.rounds, threads, rates)), flush=True)
    print(f"\nThe matrix product on {threads} threads, GFLOP/s: {with_range([rate / 1e9 for rate in rates], digits=0)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, known in (("families", tuple(STEPS)), ("trainers", TRAINERS)):
        parser.add_argument(
            f"--{name}", nargs="+", choices=known, default=known, metavar="NAME", help=f"some of: {', '.join(known)}"
        )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each case (default 3)")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: give 1 or more")
    return options


if __name__ == "__main__":
    main()
