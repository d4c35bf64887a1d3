"""How long `ortlaunch jobs` takes with 10,000 finished runs: `python -m tests.benchmarks.bench_jobs [RUNS]`.

Whole commands, as a user waits for them: the first call knows nothing of the runs, the later ones have its index.
"""

from __future__ import annotations

import os
import resource
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
            _time(folder, "jobs", *words)
        # One of the oldest, by its id alone.
        _time(folder, "status", "000001")


def _lengthen(journal: Path) -> None:
    start, params, step, end = journal.read_text().splitlines(keepends=True)
    journal.write_text(start + params + step * 20_000 + end)


def _time(folder: str, *words: str) -> None:
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "ORTLAUNCH_CACHE": f"{folder}/cache"}
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "ortlaunch", *words]
    subprocess.run(command, cwd=folder, env=variables, stdout=subprocess.DEVNULL, check=True, timeout=120)
    after, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - begin
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{seconds:6.2f} s, {processor:5.2f} s of them on a core  {' '.join(command[2:])}", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
