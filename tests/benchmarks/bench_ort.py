"""ORT's step time over eager's, on this machine, in one run: ``make bench-ort``.

Runs ``ortlaunch`` itself with its defaults and two workers, eager and ORT in turn, so that a machine whose speed drifts
slows both. A figure below 1 means that ORT is faster. Each pair gives a ratio of median step times; printed are the
ratios and their median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Case:
    """One model under one trainer."""

    model: str
    trainer: str
    steps: int
    rounds: int

    @property
    def title(self) -> str:
        return f"{self.model} {self.trainer}"


CASES = (
    Case("gpt2_nano", "ddp", steps=40, rounds=5),
    Case("gpt2_nano", "deepspeed", steps=40, rounds=5),
    Case("gpt2", "ddp", steps=8, rounds=3),
    Case("gpt2", "deepspeed", steps=8, rounds=3),
)
BACKENDS = ("eager", "ort")


def step_seconds(case: Case, backend: str, folder: Path) -> float:
    """Median step time of one run, in seconds, read from its journal."""
    overrides = [
        f"model={case.model}",
        f"trainer={case.trainer}",
        f"backend={backend}",
        f"train.steps={case.steps}",
        "launcher.workers_per_node=2",
        "tracking=none",
        f"run_root={folder / backend}",
        f"name={case.model}",
    ]
    subprocess.run(
        [sys.executable, "-m", "ortlaunch", *overrides], check=True, stdout=subprocess.DEVNULL, timeout=1200
    )
    journal = max((folder / backend).glob("*/*/journal.jsonl"), key=lambda path: path.stat().st_mtime)
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    tags = {name: value for event in events if event["event"] == "tags" for name, value in event["values"].items()}
    assert tags["ortlaunch.ort_active"] == str(backend == "ort").lower(), tags
    values = {name: value for event in events if event["event"] == "metrics" for name, value in event["values"].items()}
    return float(values["summary/step_seconds_p50"])


def measure(case: Case) -> list[dict[str, float]]:
    """Pairs of step times in the order in which they were taken; every other pair begins with the other backend."""
    pairs = []
    with tempfile.TemporaryDirectory() as name:
        for number in range(case.rounds):
            order = BACKENDS if number % 2 == 0 else BACKENDS[::-1]
            pairs.append({backend: step_seconds(case, backend, Path(name)) for backend in order})
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="run the cases whose title contains this")
    parser.add_argument("--rounds", type=int, help="pairs of runs in each case")
    arguments = parser.parse_args()
    print(f"{'case':<22} {'eager s':>8} {'ort s':>8} {'ort / eager':>12}   ratio of each pair")
    for case in CASES:
        if arguments.only and arguments.only not in case.title:
            continue
        if arguments.rounds:
            case = Case(case.model, case.trainer, case.steps, arguments.rounds)
        pairs = measure(case)
        ratios = [pair["ort"] / pair["eager"] for pair in pairs]
        medians = {backend: statistics.median(pair[backend] for pair in pairs) for backend in BACKENDS}
        each = " ".join(f"{ratio:.2f}" for ratio in ratios)
        figures = f"{medians['eager']:>8.3f} {medians['ort']:>8.3f} {statistics.median(ratios):>12.2f}"
        print(f"{case.title:<22} {figures}   {each}", flush=True)


if __name__ == "__main__":
    main()
