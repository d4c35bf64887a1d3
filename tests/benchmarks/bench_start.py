"""How long the command itself takes over what Hydra alone does: ``python -m tests.benchmarks.bench_start``."""

from __future__ import annotations

import os
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
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with tempfile.TemporaryDirectory() as folder:
        # The first round fills the disk's cache and is not counted.
        for _ in range(ROUNDS + 1):
            for name, words in COMMANDS.items():
                begin = time.perf_counter()
                subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, check=True)
                seconds[name].append(time.perf_counter() - begin)
    print(f"{ROUNDS} rounds, in turns; medians, and of the ratios within a round")
    for name, taken in seconds.items():
        ratio = statistics.median(one / base for one, base in zip(taken[1:], seconds[REFERENCE][1:], strict=True))
        print(f"{name:<26} {statistics.median(taken[1:]):>6.3f} s {ratio:>6.2f}")


if __name__ == "__main__":
    main()
