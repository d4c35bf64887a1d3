"""``backend=auto`` beside the best of eager, compile and ort, on this machine, in one run: ``make bench-auto``.

Each round runs ``backend=auto`` with an empty cache of rates ("first"), each of the three backends in turns, and
``backend=auto`` with what the three have left in the cache ("auto"). All are whole runs, from the command's start
to the end of the run. A ratio divides such a time by the least of the three in the same round, so that 1.03 means 3 %
slower than the best. Printed are medians over the rounds, and the backend that auto took in each.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ortlaunch.base.user import user_cache
from tests.benchmarks.whole_runs import words_of

PLAIN = ("eager", "compile", "ort")


@dataclass(frozen=True)
class Case:
    """One model under DDP."""

    model: str
    """A family of `tests.benchmarks.whole_runs`."""
    steps: int
    rounds: int = 2


CASES = (
    *(Case(model, steps=500) for model in ("mlp", "resnet", "vit", "own", "gpt2_nano")),
    *(Case(model, steps=60) for model in ("llama", "bert", "hf")),
    Case("gpt2", steps=40),
)


@dataclass(frozen=True)
class Measured:
    """A whole run."""

    backend: str
    seconds: float


def whole_run(case: Case, backend: str, folder: Path, cache: Path) -> Measured:
    """Runs a case to its end; the time counts from the launch."""
    overrides = [
        *words_of(case.model, folder),
        "trainer=ddp",
        f"backend={backend}",
        f"train.steps={case.steps}",
        "train.checkpoint_every=null",
        "launcher.workers_per_node=2",
        "tracking=none",
        f"run_root={folder}",
        f"name={backend}",
    ]
    command = [sys.executable, "-m", "ortlaunch", *overrides]
    variables = {**os.environ, "ORTLAUNCH_CACHE": str(cache)}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=3600, env=variables)
    journal = max(folder.glob("*/*/journal.jsonl"), key=lambda path: path.stat().st_mtime)
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    tags = {name: value for event in events if event["event"] == "tags" for name, value in event["values"].items()}
    values = {name: value for event in events if event["event"] == "metrics" for name, value in event["values"].items()}
    return Measured(tags["ortlaunch.backend"], float(values["goodput/wall_seconds"]))


def round_of(case: Case, order: tuple[str, ...], folder: Path, cache: Path) -> dict[str, Measured]:
    """One round: ``first`` in an empty cache of rates, the three, then ``auto``."""
    shutil.rmtree(cache / "backend-rates", ignore_errors=True)
    found = {"first": whole_run(case, "auto", folder, cache)}
    shutil.rmtree(cache / "backend-rates", ignore_errors=True)
    found |= {backend: whole_run(case, backend, folder, cache) for backend in order}
    return {**found, "auto": whole_run(case, "auto", folder, cache)}


def measure(case: Case) -> list[dict[str, Measured]]:
    """All rounds; every other one goes the other way round. Exports and compiled kernels are kept as for any user."""
    with tempfile.TemporaryDirectory() as name:
        folder, cache = Path(name) / "runs", Path(name) / "cache"
        cache.mkdir()
        for built in user_cache().glob("cpython-*"):
            (cache / built.name).symlink_to(built)
        orders = (PLAIN, PLAIN[::-1])
        return [round_of(case, orders[number % 2], folder, cache) for number in range(case.rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[case.model for case in CASES], help="run this model alone")
    parser.add_argument("--rounds", type=int, help="rounds of each case")
    parser.add_argument("--steps", type=int, help="steps of each run")
    arguments = parser.parse_args()
    times = f"{'eager s':>8} {'compile s':>9} {'ort s':>7}"
    print(f"{'model':<10} {'steps':>6} {times} {'auto/best':>9} {'first/best':>10}   took")
    for case in CASES:
        if arguments.only and arguments.only != case.model:
            continue
        changes = {key: getattr(arguments, key) for key in ("rounds", "steps") if getattr(arguments, key)}
        case = dataclasses.replace(case, **changes)
        print(_line(case, measure(case)), flush=True)


def _line(case: Case, rounds: list[dict[str, Measured]]) -> str:
    def seconds(backend: str) -> float:
        return statistics.median(one[backend].seconds for one in rounds)

    def ratio(name: str) -> float:
        return statistics.median(one[name].seconds / min(one[plain].seconds for plain in PLAIN) for one in rounds)

    took = " ".join(one["auto"].backend for one in rounds)
    times = f"{seconds('eager'):>8.1f} {seconds('compile'):>9.1f} {seconds('ort'):>7.1f}"
    return f"{case.model:<10} {case.steps:>6} {times} {ratio('auto'):>9.2f} {ratio('first'):>10.2f}   {took}"


if __name__ == "__main__":
    main()
