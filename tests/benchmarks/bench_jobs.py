"""How long `ortlaunch jobs` takes with 10,000 finished runs: `python -m tests.benchmarks.bench_jobs [RUNS]`.

Whole commands, as a user waits for them: the first call knows nothing of the runs, the later ones have its index.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.launch.follow.conftest import Maker


def main() -> None:
    """Makes the runs, then times the commands."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        make = Maker(Path(folder) / "runs")
        for number in range(runs):
            run_dir = make(experiment=f"experiment-{number % 20}")
            if number % 100 == 0:  # Long journals among them, so that reading one whole would show.
                _lengthen(run_dir / "journal.jsonl")
        print(f"{runs} finished runs in 20 experiments")
        for words in ([], [], ["--last", "100"], ["--state", "failed"], ["--state", "failed"], ["--all", "--json"]):
            print(f"{_seconds(folder, words):6.2f} s  ortlaunch jobs {' '.join(words)}")
        # One of the oldest, by its name alone.
        print(f"{_seconds(folder, ['000001'], 'status'):6.2f} s  ortlaunch status 000001")


def _lengthen(journal: Path) -> None:
    start, params, step, end = journal.read_text().splitlines(keepends=True)
    journal.write_text(start + params + step * 20_000 + end)


def _seconds(folder: str, words: list[str], verb: str = "jobs") -> float:
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "ORTLAUNCH_CACHE": f"{folder}/cache"}
    begin = time.perf_counter()
    command = [sys.executable, "-m", "ortlaunch", verb, *words]
    subprocess.run(command, cwd=folder, env=variables, stdout=subprocess.DEVNULL, check=True, timeout=120)
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
