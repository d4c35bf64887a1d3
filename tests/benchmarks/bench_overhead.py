"""What each watch that is on by default costs a training, and what a second worker brings: ``make bench-overhead``.

One run under ORT with ortlaunch's defaults and two workers. While it trains, each watch is switched off
for some steps, then all of them, then every step is logged, each between two turns with the defaults
(`tests/benchmarks/switches.py`). A ratio is the step time with a watch over that without it, in neighbouring turns:
1.002 means that it costs 0.2 %. Each row has the ratio of all its turns together, and its 95 % interval by resampling:
some watches do their work once in some seconds, which the median of short turns would leave out. With ``--row`` the
time goes into the rows that are asked for, and their intervals are narrower.

What takes no time in a step is not in the table: the check at the start (``make bench-guards``), checkpoints
(``make bench-checkpoint``), and the account of a run's time, which is made from the journal at the end.

Afterwards whole runs in turns: one worker on one core, two workers on two.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from ortlaunch.trainer.backend_run import _is_due
from tests.benchmarks.figures import ratio_with_interval, with_interval, with_range
from tests.benchmarks.switches import (
    ALL,
    CHOSEN,
    COMPARISON,
    DEFAULT,
    EVERY_STEP,
    NOTES,
    ROWS,
    TURN_STEPS,
    WARM_STEPS,
    WATCHES,
    steps_per_round,
)
from tests.benchmarks.whole_runs import STEPS, WORKERS, leave_nothing_running, run, turns, words_of

RUN_STEPS = 100_000
"""Length of the run whose share of comparisons is computed."""
_REPOSITORY = Path(__file__).parents[2]


def step_seconds(model: str, rounds: int, rows: list[str], folder: Path) -> list[tuple[str, float, float]]:
    """Runs it; returns for each turn that is not the default its row, its mean step, and that of its neighbours."""
    words = [
        *words_of(model, folder),
        "model.imports=[tests.benchmarks.switches]",
        "backend=ort",
        f"launcher.workers_per_node={WORKERS}",
        f"train.steps={WARM_STEPS + rounds * steps_per_round(rows)}",
        # In each turn one collection.
        f"train.gc_every={TURN_STEPS}",
        "train.checkpoint_every=null",
        "train.save_weights=false",
        "train.memory_check=off",
        f"run_root={folder / 'runs'}",
        f"tracking.uri=sqlite:///{folder}/mlruns.db",
        f"tracking.artifacts={folder}/mlartifacts",
    ]
    command = [sys.executable, "-m", "ortlaunch", *words]
    variables = os.environ | {CHOSEN: json.dumps(rows)}
    process = subprocess.Popen(
        command, cwd=_REPOSITORY, env=variables, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        if process.wait():
            sys.exit(f"the run has failed: exit code {process.returncode}")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    (notes,) = (folder / "runs").glob(f"*/*/{NOTES}")
    taken = [(one["row"], one["step_seconds"]) for one in map(json.loads, notes.read_text().splitlines())]
    found = []
    for before, here, after in zip(taken[0::3], taken[1::3], taken[2::3], strict=True):
        assert (before[0], after[0]) == (DEFAULT, DEFAULT), "the turns are out of order"
        found.append((here[0], here[1], statistics.mean((before[1], after[1]))))
    return found


def table(found: list[tuple[str, float, float]]) -> str:
    """The table of what `step_seconds` returns, and a line on the comparisons."""
    turns_of = defaultdict(list)
    for row, here, usual in found:
        turns_of[row].append((here, usual))
    lines = ["| watch | step time with it over that without |", "| --- | --- |"]
    lines += [
        f"| {row} | {ratio_with_interval([(usual, here) for here, usual in turns_of[row]])} |"
        for row in (*WATCHES, ALL)
        if row in turns_of
    ]
    if EVERY_STEP in turns_of:
        lines += [f"| {EVERY_STEP} over 10 | {ratio_with_interval(turns_of[EVERY_STEP])} |"]
    if COMPARISON in turns_of:
        steps = [TURN_STEPS * (here / usual - 1) for here, usual in turns_of[COMPARISON]]
        due = sum(_is_due(number, None) for number in range(1, RUN_STEPS + 1))
        share = due * statistics.median(steps) / RUN_STEPS
        told = f"{COMPARISON} takes {with_interval(steps)} steps; {due} of them in {RUN_STEPS:,} steps: {share:.3%}"
        lines += ["", told]
    return "\n".join(lines)


def growth(model: str, rounds: int, folder: Path) -> str:
    """A table of one worker on one core and two on two."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        return "One core: a second worker has none, so its gain is not measured"
    counts = ("1", "2")
    rates: dict[str, list[float]] = {count: [] for count in counts}
    for order in turns(counts, rounds):
        for count in order:
            ran = run(
                f"model={model}",
                f"launcher.workers_per_node={count}",
                f"train.steps={STEPS[model]}",
                "train.save_weights=false",
                backend="ort",
                folder=folder,
                within=("taskset", "-c", ",".join(map(str, cores[: int(count)]))),
            )
            rates[count].append(ran.rate)
    lines = ["| workers, a core each | tokens/s (images/s) | over one |", "| --- | --- | --- |"]
    for count in counts:
        over_one = [rate / one for rate, one in zip(rates[count], rates["1"], strict=True)]
        lines.append(f"| {count} | {with_range(rates[count], digits=0)} | {with_range(over_one)} |")
    return "\n".join(lines)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(STEPS), default="gpt2_nano")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each row (default 10)")
    parser.add_argument("--growth-rounds", type=int, default=3, help="rounds of one and two workers (default 3)")
    parser.add_argument("--row", action="append", choices=tuple(ROWS), help="a row to measure; without it all of them")
    options = parser.parse_args()
    if options.rounds < 1 or options.growth_rounds < 0:
        parser.error("--rounds takes 1 or more, --growth-rounds 0 or more")
    leave_nothing_running()
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        print(
            f"{options.model} under ORT, {WORKERS} workers, cores: {cores}, turns of {TURN_STEPS} steps\n", flush=True
        )
        found = step_seconds(options.model, options.rounds, options.row or list(ROWS), Path(name))
        usual = statistics.median(usual for _, _, usual in found)
        print(table(found), f"\n\nA step takes {usual:.3f} s.\n", flush=True)
        if options.growth_rounds:
            print(growth(options.model, options.growth_rounds, Path(name)))


if __name__ == "__main__":
    main()
