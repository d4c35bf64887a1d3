"""How long `ortlaunch compare` takes over many runs: `python -m tests.benchmarks.bench_compare [RUNS [POINTS]]`.

Beside each comparison, in turn with it, MLflow alone does the same reading: `mlflow.search_runs`, and the histories
that the comparison needs. Whole processes, with their imports, and the most memory that each of them held.
"""

from __future__ import annotations

import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

EXPERIMENT = "many"
CURVES = ("throughput/tokens_per_second", "memory/rss_gib", "train/loss")
SUMMARY = ("summary/tokens_per_second_median", "summary/step_seconds_p50", "summary/step_seconds_p95")
SUMMARY += ("summary/peak_memory_gib", "summary/steady_windows")
OTHERS = tuple(f"throughput/other_{number}" for number in range(12))
ROUNDS = 3
ALONE = """
import sys, mlflow
uri, runs, drawn, *keys = sys.argv[1:]
mlflow.set_tracking_uri(uri)
frame = mlflow.search_runs(experiment_names=["many"], max_results=int(runs), order_by=["attributes.start_time DESC"])
client = mlflow.MlflowClient()
for run_id in frame.run_id[: int(drawn)]:
    for key in keys:
        client.get_metric_history(run_id, key)
"""


def main() -> None:
    """Makes the store, then times both in turn."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    points = int(sys.argv[2]) if len(sys.argv) > 2 else 500
    with tempfile.TemporaryDirectory() as folder:
        uri = f"sqlite:///{folder}/mlruns.db"
        begin = time.perf_counter()
        fill(Path(folder), runs, points)
        size = (Path(folder) / "mlruns.db").stat().st_size / 2**30
        print(
            f"{runs} runs of 20 metrics x {points} points, {size:.1f} GiB, made in {time.perf_counter() - begin:.0f} s"
        )
        _measure("the table", folder, uri, runs, 0)
        _measure("a page, 20 runs drawn", folder, uri, runs, min(20, runs), "--html", "page.html", "--force")
        _measure(f"a page, {runs} runs drawn", folder, uri, runs, runs, "--html", "page.html", "--force")
        print(f"the page with {runs} runs: {(Path(folder) / 'page.html').stat().st_size / 2**20:.1f} MiB")


def _measure(title: str, folder: str, uri: str, runs: int, drawn: int, *options: str) -> None:
    ours = [sys.executable, "-m", "ortlaunch", "compare", "--uri", uri, "--experiment", EXPERIMENT, "--last", str(runs)]
    ours += ["--curves", str(max(drawn, 1)), *options]
    alone = [sys.executable, "-c", ALONE, uri, str(runs), str(drawn), *CURVES]
    pairs = [(_timed(alone, folder), _timed(ours, folder)) for _ in range(ROUNDS)]
    print(title)
    for side, name in enumerate(("MLflow alone", "compare")):
        seconds, core, memory = (statistics.median(pair[side][n] for pair in pairs) for n in range(3))
        print(f"  {name:<13} {seconds:6.2f} s, {core:6.2f} s of them on a core, {memory:4.0f} MiB at the most")
    for n, name in enumerate(("time", "time on a core")):
        ratios = [ours[n] / alone[n] for alone, ours in pairs]
        each = " ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"  ratio of {name}: {statistics.median(ratios):.2f} ({each})", flush=True)


def _timed(command: list[str], folder: str) -> tuple[float, float, float]:
    """Seconds, those on a core, and MiB at the most."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MLFLOW_DISABLE_TELEMETRY": "true"}
    begin = time.perf_counter()
    process = subprocess.Popen(command, cwd=folder, env=variables, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, command
    return time.perf_counter() - begin, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def fill(folder: Path, runs: int, points: int) -> None:
    """Writes the runs into a store of MLflow's own schema, past MLflow, which would take an hour."""
    from ortlaunch.tracking.store import open_client

    client = open_client(f"sqlite:///{folder}/mlruns.db", 30)
    experiment = client.create_experiment(EXPERIMENT, artifact_location=(folder / "artifacts").as_uri())
    template = client.create_run(experiment)
    client.set_terminated(template.info.run_id)
    with closing(sqlite3.connect(folder / "mlruns.db")) as database:
        database.execute("PRAGMA synchronous=OFF")
        database.execute("PRAGMA journal_mode=OFF")
        for number in range(runs):
            _run(database, template.info.run_id, number, points)
        for table in ("tags", "latest_metrics", "runs"):
            database.execute(f"DELETE FROM {table} WHERE run_uuid = ?", (template.info.run_id,))
        database.commit()


def _run(database: sqlite3.Connection, template: str, number: int, points: int) -> None:
    run_id, start = uuid.uuid4().hex, 1_700_000_000_000 + number * 1000
    names = [column[1] for column in database.execute("PRAGMA table_info(runs)")]
    row = dict(
        zip(names, database.execute("SELECT * FROM runs WHERE run_uuid = ?", (template,)).fetchone(), strict=True)
    )
    row |= {"run_uuid": run_id, "name": f"run-{number}", "start_time": start, "end_time": start + 1000}
    _insert(database, "runs", row)
    # Two hundred configurations, five repeats of each.
    params = {"seed": str(number % 5), "optimizer.lr": str(number // 5)} | {f"group.key_{n}": str(n) for n in range(40)}
    tags = {"mlflow.runName": f"run-{number}", "ortlaunch.backend": "eager", "ortlaunch.world_size": "2"}
    for key, value in params.items():
        _insert(database, "params", {"key": key, "value": value, "run_uuid": run_id})
    for key, value in tags.items():
        _insert(database, "tags", {"key": key, "value": value, "run_uuid": run_id})
    database.executemany(
        "INSERT INTO metrics (key, value, timestamp, run_uuid, step, is_nan) VALUES (?, ?, ?, ?, ?, 0)",
        _points(run_id, start, points),
    )
    database.executemany(
        "INSERT INTO latest_metrics (key, value, timestamp, step, is_nan, run_uuid) VALUES (?, ?, ?, ?, 0, ?)",
        [(key, 1.0 + number / 100, start, points, run_id) for key in (*CURVES, *SUMMARY, *OTHERS)],
    )


def _points(run_id: str, start: int, points: int) -> Iterator[tuple[str, float, int, str, int]]:
    for key in (*CURVES, *SUMMARY, *OTHERS):
        for step in range(points):
            yield key, 1.0 + (step * 7 % 13) / 10, start + step, run_id, step


def _insert(database: sqlite3.Connection, table: str, row: dict[str, object]) -> None:
    marks = ", ".join("?" * len(row))
    database.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", list(row.values()))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
