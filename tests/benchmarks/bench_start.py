"""How long the command itself takes over what Hydra alone does: ``python -m tests.benchmarks.bench_start``.

Processor seconds are those of the command and of the processes that it started, in user mode and in the kernel. They
depend less than the wall time on what else the machine does.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 15
REFERENCE = "python -c 'import hydra'"
COMMANDS = {
    REFERENCE: ("-c", "import hydra"),
    "ortlaunch --version": ("-m", "ortlaunch", "--version"),
    "ortlaunch --help": ("-m", "ortlaunch", "--help"),
    "ortlaunch --cfg job": ("-m", "ortlaunch", "--cfg", "job"),
    "a dry run": ("-m", "ortlaunch", "launcher.dry_run=true"),
}


def main() -> None:
    """Measures and prints."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with tempfile.TemporaryDirectory() as folder:
        # The first round fills the disk's cache and is not counted.
        for number in range(ROUNDS + 1):
            for name, words in COMMANDS.items():
                begin, used = time.perf_counter(), _processor_seconds()
                subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, check=True)
                if number:
                    seconds[name].append((time.perf_counter() - begin, _processor_seconds() - used))
    print(f"{ROUNDS} rounds, in turns; medians, and of the ratios within a round")
    print(f"{'':<26} {'wall':>8} {'ratio':>6} {'processor':>10} {'ratio':>6}")
    for name, taken in seconds.items():
        wall, processor = (_median_and_ratio(taken, seconds[REFERENCE], kind) for kind in (0, 1))
        print(f"{name:<26} {wall[0]:>6.3f} s {wall[1]:>6.2f} {processor[0]:>8.3f} s {processor[1]:>6.2f}")


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _median_and_ratio(
    taken: list[tuple[float, float]], base: list[tuple[float, float]], kind: int
) -> tuple[float, float]:
    ratios = [one[kind] / other[kind] for one, other in zip(taken, base, strict=True)]
    return statistics.median(one[kind] for one in taken), statistics.median(ratios)


if __name__ == "__main__":
    main()
