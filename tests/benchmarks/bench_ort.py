"""Step time of ORT over that of eager and of torch.compile, on this machine, in one run: ``make bench NAME=ort``.

Runs ``ortlaunch`` itself with its defaults and two workers, the backends in turn, so that a machine whose speed drifts
slows all. A figure below 1 means that ORT is faster. Each round gives a ratio of median step times; printed are the
ratios' medians, and those over eager one by one.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.whole_runs import STEPS, WORKERS, leave_nothing_running, run, turns


@dataclass(frozen=True)
class Case:
    """One model under one trainer."""

    model: str
    trainer: str
    rounds: int
    backends: tuple[str, ...] = ("eager", "compile", "ort")

    @property
    def title(self) -> str:
        return f"{self.model} {self.trainer}"


_BOTH = ("eager", "ort")
CASES = (
    Case("gpt2_nano", "ddp", rounds=3),
    Case("gpt2_nano", "deepspeed", rounds=3, backends=_BOTH),
    Case("gpt2", "ddp", rounds=2),
    Case("gpt2", "deepspeed", rounds=2, backends=_BOTH),
    *(Case(model, "ddp", rounds=2) for model in ("mlp", "resnet", "vit", "bert", "llama")),
)


def step_seconds(case: Case, backend: str, folder: Path) -> float:
    """Median step time of one run, in seconds, read from its journal."""
    return run(
        f"model={case.model}",
        f"trainer={case.trainer}",
        f"train.steps={STEPS[case.model]}",
        f"launcher.workers_per_node={WORKERS}",
        f"name={case.model}",
        backend=backend,
        folder=folder,
    ).step_seconds


def measure(case: Case) -> list[dict[str, float]]:
    """Rounds of step times in the order in which they were taken; every other one goes the other way round."""
    with tempfile.TemporaryDirectory() as name:
        return [
            {backend: step_seconds(case, backend, Path(name)) for backend in order}
            for order in turns(case.backends, case.rounds)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="run the cases whose title contains this")
    parser.add_argument("--rounds", type=int, help="rounds of each case")
    arguments = parser.parse_args()
    leave_nothing_running()
    names = f"{'eager s':>8} {'compile s':>9} {'ort s':>8} {'ort/eager':>10} {'ort/compile':>11}"
    print(f"{'case':<20} {names}   ort/eager of each")
    for case in CASES:
        if arguments.only and arguments.only not in case.title:
            continue
        if arguments.rounds:
            case = dataclasses.replace(case, rounds=arguments.rounds)
        print(_line(case, measure(case)), flush=True)


def _line(case: Case, rounds: list[dict[str, float]]) -> str:
    def seconds(backend: str) -> str:
        return f"{statistics.median(one[backend] for one in rounds):.3f}" if backend in case.backends else "-"

    def ratios(backend: str) -> list[float]:
        return [one["ort"] / one[backend] for one in rounds] if backend in case.backends else []

    over_eager, over_compile = (
        f"{statistics.median(r):.2f}" if (r := ratios(b)) else "-" for b in ("eager", "compile")
    )
    each = " ".join(f"{ratio:.2f}" for ratio in ratios("eager"))
    figures = f"{seconds('eager'):>8} {seconds('compile'):>9} {seconds('ort'):>8} {over_eager:>10} {over_compile:>11}"
    return f"{case.title:<20} {figures}   {each}"


if __name__ == "__main__":
    main()
