"""A launcher that another package brings, by its entry point alone: nothing of ortlaunch knows of `launcher=pbs`.

Its scheduler is a stand-in (`scheduler.py`) with PBS's programs; the runs and their jobs are real.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.environment import environment
from tests.support.waiting import until

HERE = Path(__file__).parent
_LONGEST_SECONDS = 150.0
TINY = ("launcher=pbs", "model=mlp", "backend=eager", "trainer=single", "train.log_every=1")


class Cluster:
    """The commands that a user types where the package and the scheduler's programs are installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "spool").mkdir(parents=True)
        path = os.pathsep.join([str(HERE / "installed"), *filter(None, sys.path)])
        self._variables = {
            **environment(),
            "PYTHONPATH": path,
            "PATH": f"{HERE / 'bin'}:{os.environ['PATH']}",
            "PBS_SPOOL": str(folder / "spool"),
        }

    def ortlaunch(self, *words: str, code: int = 0, installed: bool = True) -> str:
        """Runs a command to its end, with the launcher's package or without; returns what it printed."""
        done = self.run(sys.executable, "-m", "ortlaunch", *words, installed=installed)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def run(self, *words: str, installed: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs a program to its end."""
        variables = self._variables if installed else self._variables | {"PYTHONPATH": str(HERE.parents[2])}
        return subprocess.run(
            words, cwd=self.folder, env=variables, capture_output=True, text=True, timeout=120, check=False
        )

    def submit(self, *words: str) -> Path:
        """Submits a run; returns its folder."""
        found = re.search(r"^run folder: (.*)$", self.ortlaunch(*TINY, *words), re.MULTILINE)
        assert found is not None
        return Path(found[1])

    def row(self, run_dir: Path, *, installed: bool = True) -> dict[str, Any]:
        """What `ortlaunch status` says of a run."""
        found: dict[str, Any] = json.loads(self.ortlaunch("status", str(run_dir), "--json", installed=installed))
        return found

    def wait(self, run_dir: Path, *, step: int | None = None) -> None:
        """Waits until a run has made a step, or has ended."""
        deadline = time.monotonic() + _LONGEST_SECONDS
        journal = run_dir / "journal.jsonl"
        text = f'"step": *{step}\\b.*train/loss' if step is not None else '"event": *"end"'
        while not re.search(text, journal.read_text()):
            assert time.monotonic() < deadline, (run_dir / "logs" / "job.log").read_text()
            time.sleep(0.1)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "project")
    yield made
    for path in (tmp_path / "project" / "spool").glob("*.pbs.json"):
        made.run("qdel", path.name.removesuffix(".json"))


def test_its_keys_are_those_of_its_own_dataclass(cluster: Cluster) -> None:
    composed = cluster.ortlaunch("launcher=pbs", "launcher.queue=night", "--cfg", "job")
    assert "  queue: night\n" in composed
    assert "Did you mean launcher.queue" in cluster.ortlaunch("launcher=pbs", "launcher.queu=night", code=2)
    assert "it belongs to launcher=pbs" in cluster.ortlaunch("launcher=slurm", "launcher.walltime=1:00:00", code=2)
    assert "launcher.walltime=soon: must be" in cluster.ortlaunch(*TINY, "launcher.walltime=soon", code=2)


def test_a_dry_run_shows_the_script(cluster: Cluster) -> None:
    shown = cluster.ortlaunch(*TINY, "name=one", "launcher.queue=night", "launcher.dry_run=true")
    assert shown.startswith("#!/bin/bash\n#PBS -N one\n#PBS -q night\n")
    assert "-m ortlaunch.launch.queue.job /" in shown
    assert not (cluster.folder / "runs").exists()


def test_a_run_from_the_queue_to_its_end(cluster: Cluster) -> None:
    """The second comes after the first; MLflow knows both, and `jobs` and `status` where they are."""
    first = cluster.submit("name=first", "train.steps=100")
    second = cluster.submit("name=second", "train.steps=2", "tracking=none", "+after=first")
    rows = {row["name"]: row for row in json.loads(cluster.ortlaunch("jobs", "--json"))}
    assert [(rows[name]["launcher"], rows[name]["job_id"]) for name in ("first", "second")] == [
        ("pbs", "1.pbs"),
        ("pbs", "2.pbs"),
    ]
    assert (rows["second"]["state"], rows["second"]["reason"]) == ("pending", "waits for another job")
    assert rows["first"]["state"] in ("pending", "running")
    assert "PBS job 1.pbs" in cluster.ortlaunch("status", "1.pbs")
    cluster.wait(second)
    assert cluster.row(second)["state"] == "finished"
    row = cluster.row(first)
    assert row["state"] == "finished" and row["mlflow_run_id"]
    tags = row["tags"]
    assert (tags["pbs.job_id"], tags["pbs.nodes"], tags["ortlaunch.state"]) == ("1.pbs", "localhost", "finished")
    assert "first" in cluster.ortlaunch("compare", "first")
    assert "--- job 1.pbs" in cluster.ortlaunch("logs", "first", "--log", "job")


@pytest.mark.nightly
def test_a_run_is_cancelled_with_a_checkpoint_and_resumed(cluster: Cluster) -> None:
    run_dir = cluster.submit("name=long", "train.steps=1000000", "tracking=none")
    cluster.wait(run_dir, step=5)
    assert "stopped at step" in cluster.ortlaunch("cancel", "long")
    row = cluster.row(run_dir)
    assert (row["state"], row["is_over"]) == ("stopped", True)
    reached = int(row["step"])
    assert int(row["checkpoint"].removeprefix("step-")) == reached
    without = cluster.ortlaunch("resume", "long", installed=False, code=2)
    assert "launcher=pbs: there is no such launcher (there are local, slurm): install its package" in without
    assert cluster.row(run_dir, installed=False)["state"] == "stopped"
    refused = cluster.ortlaunch("resume", "long", "launcher.walltime=soon", code=2)
    assert "launcher.walltime" in refused
    assert "is in the queue as job 2.pbs" in cluster.ortlaunch("resume", "long", f"train.steps={reached + 3}")
    cluster.wait(run_dir, step=reached + 3)
    deadline = time.monotonic() + _LONGEST_SECONDS
    while (row := cluster.row(run_dir))["state"] != "finished" and time.monotonic() < deadline:
        time.sleep(0.3)
    assert (row["state"], row["step"], row["job_id"]) == ("finished", reached + 3, "2.pbs")


@pytest.mark.nightly
def test_the_schedulers_warning_queues_a_run_again(cluster: Cluster) -> None:
    run_dir = cluster.submit("name=warned", "train.steps=1000000", "tracking=none")
    cluster.wait(run_dir, step=5)
    assert cluster.run("qsig", "-s", "USR2", "1.pbs").returncode == 0
    deadline = time.monotonic() + _LONGEST_SECONDS
    while '"requeue"' not in (run_dir / "journal.jsonl").read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    history = json.loads((run_dir / "history.json").read_text())["attempts"]
    assert history[0]["why"].startswith("warned by a signal")
    assert history[0]["checkpoint"].startswith("step-")
    cluster.ortlaunch("cancel", "warned", "--now")
    assert cluster.row(run_dir)["is_over"]


@pytest.mark.nightly
def test_a_sweep_is_a_job_for_each_run(cluster: Cluster) -> None:
    words = ("name=grid", "train.steps=2", "tracking=none", "optimizer.lr=0.1,0.2", "--multirun")
    said = cluster.ortlaunch(*TINY, *words)
    assert "is in the queue as jobs 1.pbs, 2.pbs: 2 runs of 1 node" in said
    sweep = re.search(r"^runs: *ortlaunch jobs --sweep (\S+)$", said, re.MULTILINE)
    assert sweep is not None
    (folder,) = (cluster.folder / "runs" / "default").glob("multirun-*")
    deadline = time.monotonic() + _LONGEST_SECONDS
    while '"end"' not in (folder / "journal.jsonl").read_text() and time.monotonic() < deadline:
        time.sleep(0.2)
    rows = json.loads(cluster.ortlaunch("jobs", "--sweep", sweep[1], "--json"))
    assert [(row["state"], row["job_id"]) for row in sorted(rows, key=lambda row: row["name"])] == [
        ("finished", "1.pbs"),
        ("finished", "2.pbs"),
    ]
    assert '"FINISHED"' in (folder / "journal.jsonl").read_text()


def test_no_file_of_the_package_names_it() -> None:
    package = HERE.parents[2] / "ortlaunch"
    # sbatch has an option with the word in its name.
    found = re.compile(r"(?<!--ignore-)\bpbs\b")
    assert [path for path in package.rglob("*.py") if found.search(path.read_text()) is not None] == []


SCRIPT = """
import os, signal, sys, time
from pathlib import Path

import mlflow

saved = Path(os.environ["ORTLAUNCH_CHECKPOINTS"], "reached")
begun = int(saved.read_text()) if saved.exists() else 0

def save(*_):
    saved.write_text(str(step + 1))
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
for step in range(begun, begun + 4 if os.environ["ORTLAUNCH_ATTEMPT"] == "2" else 1000000):
    mlflow.log_metric("train/loss", 1.0, step=step)
    print("attempt", os.environ["ORTLAUNCH_ATTEMPT"], "step", step)
    time.sleep(0.2)
"""


@pytest.mark.nightly
def test_a_script_is_queued_again_cancelled_in_order_and_resumed(cluster: Cluster) -> None:
    """It gets SIGTERM from the watch on its node, and goes on from what it has saved, as the same run."""
    (cluster.folder / "mine.py").write_text(SCRIPT)
    words = ("launcher=pbs", "launcher.workers_per_node=1", "tracking=none", "--", "mine.py")
    found = re.search(r"^run folder: (.*)$", cluster.ortlaunch(*words), re.MULTILINE)
    assert found is not None
    run_dir, saved = Path(found[1]), Path(found[1]) / "checkpoints" / "reached"
    cluster.wait(run_dir, step=5)
    assert cluster.run("qsig", "-s", "USR2", "1.pbs").returncode == 0
    until(saved.exists)
    warned = int(saved.read_text())
    cluster.wait(run_dir, step=warned + 3)
    history = json.loads((run_dir / "history.json").read_text())["attempts"]
    assert history[0]["why"] == "warned by a signal to the batch shell"
    cluster.ortlaunch("cancel", str(run_dir))
    assert cluster.row(run_dir)["state"] == "stopped"
    cancelled = int(saved.read_text())
    assert cancelled > warned > 5
    assert "is in the queue as job 2.pbs" in cluster.ortlaunch("resume", str(run_dir))
    until(lambda: cluster.row(run_dir)["state"] == "finished", said=lambda: (run_dir / "logs" / "job.log").read_text())
    log = (run_dir / "logs" / "rank-0.log").read_text()
    assert f"attempt 1 step {warned}\n" in log
    assert f"attempt 2 step {cancelled}\n" in log
    assert (run_dir / "journal.jsonl").read_text().count('"event": "end"') == 2
