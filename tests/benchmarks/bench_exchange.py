"""What exchanging gradients through shared memory brings over gloo, on a CPU: ``make bench NAME=exchange``.

First sums of some sizes by two workers, both ways in turns in the same processes. Then whole runs in turns, with
``trainer.shared_memory=true`` and ``false``: the ratio of their tokens (images) per second within a round.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from ortlaunch.trainer.shared_memory import connect
from ortlaunch.trainer.workers import Workers
from tests.benchmarks.figures import with_range
from tests.benchmarks.whole_runs import STEPS, WORKERS, leave_nothing_running, run, turns

SIZES = (1_000, 30_000, 300_000, 3_000_000, 25_000_000)
_TURNS = 7
_NUMBERS = 20_000_000
"""How many numbers are added up in one turn, at most in `_MOST` sums."""
_MOST = 200


def sums() -> None:
    """One worker's part of the first table, under torchrun."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    memory = connect(Workers(dist.get_rank(), WORKERS, torch.device("cpu"), 1))
    assert memory is not None
    if dist.get_rank() == 0:
        print("| fp32 numbers | gloo, ms | shared memory, ms | gloo over it |\n| --- | --- | --- | --- |", flush=True)
    for size in SIZES:
        tensor = torch.zeros(size)
        pairs = [(_seconds(dist.all_reduce, tensor), _seconds(memory.sum_, tensor)) for _ in range(_TURNS + 1)][1:]
        if dist.get_rank() == 0:
            gloo, ours = ([1000 * second for second in seconds] for seconds in zip(*pairs, strict=True))
            ratio = with_range([first / second for first, second in pairs], digits=1)
            print(f"| {size:,} | {with_range(gloo)} | {with_range(ours)} | {ratio} |", flush=True)
    dist.barrier()
    os._exit(0)


def _seconds(exchange: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> float:
    count = max(3, min(_MOST, _NUMBERS // tensor.numel()))
    began = time.perf_counter()
    for _ in range(count):
        exchange(tensor)
    return (time.perf_counter() - began) / count


def whole(model: str, trainer: str, backend: str, rounds: int, folder: Path) -> str:
    """A row of the second table."""
    rates: dict[str, list[float]] = {"true": [], "false": []}
    for order in turns(tuple(rates), rounds):
        for value in order:
            ran = run(
                f"model={model}",
                f"trainer={trainer}",
                f"trainer.shared_memory={value}",
                f"launcher.workers_per_node={WORKERS}",
                f"train.steps={STEPS[model]}",
                "train.save_weights=false",
                "train.memory_check=off",
                backend=backend,
                folder=folder,
            )
            rates[value].append(ran.rate)
    ratios = [ours / gloo for ours, gloo in zip(rates["true"], rates["false"], strict=True)]
    gloo, ours = (with_range(rates[value], digits=0) for value in ("false", "true"))
    return f"| {model} | {trainer} | {backend} | {gloo} | {ours} | {with_range(ratios)} |"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=tuple(STEPS), default=["gpt2_nano", "mlp", "resnet"])
    parser.add_argument("--backends", nargs="*", default=["eager", "ort"])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    leave_nothing_running()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}"]
    subprocess.run(
        [*torchrun, "-m", "tests.benchmarks.bench_exchange"],
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    print("\n| | trainer | backend | gloo, tokens/s (images/s) | shared memory | over gloo |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for model in options.models:
            for trainer in ("ddp", "deepspeed"):
                for backend in options.backends:
                    print(whole(model, trainer, backend, options.rounds, Path(folder)), flush=True)


if __name__ == "__main__":
    sums() if "LOCAL_RANK" in os.environ else main()
