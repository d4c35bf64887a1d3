"""How long commands and runs take until they work: ``python -m tests.benchmarks.bench_start``.

First short commands over what Hydra alone does. Then a run's time from the command to the end of its first step under
ORT, whose export is in the cache, over that under eager. All as an installed package runs: with its bytecode compiled
before, and in turns; of each ratio within a round the median, with the least and the largest in brackets.

Processor seconds are those of the command and of the processes that it started, in user mode and in the kernel. They
depend less than the wall time on what else the machine does.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.figures import with_range
from tests.benchmarks.whole_runs import STEPS, WORKERS, Ran, leave_nothing_running, run, turns

REFERENCE = "python -c 'import hydra'"
COMMANDS = {
    REFERENCE: ("-c", "import hydra"),
    "ortlaunch --version": ("-m", "ortlaunch", "--version"),
    "ortlaunch --help": ("-m", "ortlaunch", "--help"),
    "ortlaunch --cfg job": ("-m", "ortlaunch", "--cfg", "job"),
    "a dry run": ("-m", "ortlaunch", "launcher.dry_run=true"),
}
BACKENDS = ("eager", "ort")
PHASES = {
    "startup/time_to_first_step_seconds": "from the command to the end of the first step",
    "startup/import_seconds": "of it imports",
    "startup/build_seconds": "data, model, wrapper and optimizer",
    "startup/ort_export_seconds": "reading the export, gradient graph and session",
    "startup/ort_check_seconds": "the check against PyTorch, without them",
}
"""Start-up metrics of a run, and what they are of. Those that a backend does not have are left out."""


def command_seconds(rounds: int, folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Runs the commands in turns; returns the wall and the processor seconds of each."""
    environment = _with_bytecode(folder)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    # The first round compiles the bytecode, fills the disk's cache and is not counted.
    for number, order in enumerate(turns(tuple(COMMANDS), rounds + 1)):
        for name in order:
            begin, used = time.perf_counter(), _processor_seconds()
            command = [sys.executable, *COMMANDS[name]]
            subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True)
            if number:
                seconds[name].append((time.perf_counter() - begin, _processor_seconds() - used))
    return seconds


def command_table(seconds: dict[str, list[tuple[float, float]]]) -> str:
    """The table of what `command_seconds` returns."""
    lines = ["| command | wall, s | over Hydra | processor, s | over Hydra |", "| --- | --- | --- | --- | --- |"]
    for name, taken in seconds.items():
        cells = []
        for kind in (0, 1):
            over = [one[kind] / other[kind] for one, other in zip(taken, seconds[REFERENCE], strict=True)]
            cells += [f"{statistics.median(one[kind] for one in taken):.3f}", with_range(over)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def starts(model: str, rounds: int, folder: Path) -> dict[str, list[Ran]]:
    """Makes runs of one step in turns, by backend; the runs of the first round are left out."""
    ran: dict[str, list[Ran]] = {backend: [] for backend in BACKENDS}
    environment = _with_bytecode(folder)
    # The first round compiles the bytecode and fills the export cache.
    for number, order in enumerate(turns(BACKENDS, rounds + 1)):
        for backend in order:
            words = (f"model={model}", f"launcher.workers_per_node={WORKERS}", "train.steps=1")
            kept = ("train.checkpoint_every=null", "train.save_weights=false")
            here = run(*words, *kept, backend=backend, folder=folder, environment=environment)
            if number:
                assert backend == "eager" or here.tags["ortlaunch.export_cache"] == "hit", here.tags
                ran[backend].append(here)
    return ran


def start_table(ran: dict[str, list[Ran]]) -> str:
    """The table of what `starts` returns."""
    lines = ["| seconds | eager | ort | ort over eager |", "| --- | --- | --- | --- |"]
    for metric, words in PHASES.items():
        taken = {backend: [one.values[metric] for one in ran[backend] if metric in one.values] for backend in BACKENDS}
        both = [ort / eager for eager, ort in zip(taken["eager"], taken["ort"], strict=False)]
        cells = [with_range(taken[backend]) if taken[backend] else "" for backend in BACKENDS]
        lines.append(f"| {words} | {' | '.join(cells)} | {with_range(both) if both else ''} |")
    return "\n".join(lines)


def _with_bytecode(folder: Path) -> dict[str, str]:
    """Variables with which commands of this tree keep their bytecode in a folder, also where Python is told not to."""
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="rounds of the commands (default 15)")
    parser.add_argument("--start-rounds", type=int, default=5, help="rounds of runs (default 5)")
    parser.add_argument("--model", choices=tuple(STEPS), default="gpt2_nano", help="the model of the runs")
    options = parser.parse_args()
    if min(options.rounds, options.start_rounds) < 0:
        parser.error("--rounds and --start-rounds take 0 or more")
    leave_nothing_running()
    with tempfile.TemporaryDirectory() as name:
        if options.rounds:
            seconds = command_seconds(options.rounds, Path(name))
            print(f"{options.rounds} rounds\n\n{command_table(seconds)}\n", flush=True)
        if options.start_rounds:
            print(f"{options.model}, {WORKERS} workers, {options.start_rounds} rounds\n")
            print(start_table(starts(options.model, options.start_rounds, Path(name))))


if __name__ == "__main__":
    main()
