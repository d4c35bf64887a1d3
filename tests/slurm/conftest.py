"""A real SLURM cluster of two nodes for these tests (slurm/lab), and runs on it."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import ortlaunch
from tests.support.environment import environment
from tests.support.needs import needs

ROOT = Path(ortlaunch.__file__).parents[1]
sys.path.insert(0, str(ROOT / "slurm" / "lab"))
import lab as cluster  # noqa: E402
from files import Lab  # noqa: E402

PATIENCE = 240
"""Longest wait for anything: some ten times what it takes on an idle machine."""


@dataclass(frozen=True)
class Job:
    """A run that was submitted."""

    run_dir: Path
    job_id: str
    said: str
    slurm: Slurm

    @property
    def events(self) -> list[dict[str, Any]]:
        """The journal."""
        path = self.run_dir / "journal.jsonl"
        text = path.read_text() if path.is_file() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    @property
    def tags(self) -> dict[str, str]:
        """The latest value of each tag."""
        return {key: value for event in self._of("tags") for key, value in event["values"].items()}

    @property
    def losses(self) -> dict[int, list[float]]:
        """Every loss that was journalled, by step."""
        found: dict[int, list[float]] = {}
        for event in self._of("metrics"):
            if "train/loss" in event["values"]:
                found.setdefault(event["step"], []).append(event["values"]["train/loss"])
        return found

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """What the run says of its attempts."""
        path = self.run_dir / "history.json"
        return json.loads(path.read_text())["attempts"] if path.is_file() else []

    @property
    def status(self) -> str:
        """How the journal says that the run ended."""
        return next((event["status"] for event in self._of("end")), "unfinished")

    @property
    def state(self) -> str:
        """SLURM's word for the job."""
        return self.slurm.state(self.job_id)

    @property
    def report(self) -> str:
        """Everything to look at when an assertion about this run fails."""
        logs = [f"--- {path}\n{path.read_text(errors='replace')[-3000:]}" for path in self.run_dir.glob("logs/*.log")]
        return "\n".join([self.said, f"state {self.state}", json.dumps(self.attempts, indent=1), *logs])

    def wait_for_step(self, step: int) -> None:
        """Waits until a step's loss is journalled."""
        self.wait_until(lambda: max(self.losses, default=0) >= step, f"step {step}")

    def wait_for_end(self) -> Job:
        """Waits until the job is over, however it ended."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait_until(lambda: self.state in over, "the job's end")
        return self

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        """Waits until something holds; fails the test if it does not come."""
        deadline = time.monotonic() + PATIENCE
        while not holds():
            if time.monotonic() > deadline:
                pytest.fail(f"no {what} within {PATIENCE} s\n{self.report}")
            time.sleep(0.2)

    def _of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]


class Slurm:
    """The cluster, and commands on it."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab

    @property
    def environment(self) -> dict[str, str]:
        """What a user's shell on the login node has."""
        return environment() | {"SLURM_CONF": str(self.lab.conf)}

    def __call__(self, *command: str) -> str:
        """Standard output of one of SLURM's commands, which must succeed."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def state(self, job_id: str) -> str:
        """SLURM's word for a job."""
        return re.search(r"\bJobState=(\S+)", self("scontrol", "show", "job", "-o", job_id))[1]  # type: ignore[index]

    def run(self, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        """``ortlaunch ARGUMENTS...`` as typed on the login node."""
        return subprocess.run(
            [sys.executable, "-m", "ortlaunch", *arguments],
            cwd=cwd,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    def submit(self, cwd: Path, *overrides: str) -> Job:
        """Submits a run of two nodes."""
        done = self.run(cwd, "launcher=slurm", "launcher.nodes=2", "launcher.workers_per_node=1", *overrides)
        assert done.returncode == 0, done.stderr
        run_dir = re.search(r"^run folder: (.*?)(?=\nmlflow:|\Z)", done.stdout.rstrip("\n"), re.MULTILINE | re.DOTALL)
        job_id = re.search(r"as job (\d+)", done.stdout)
        assert run_dir and job_id, done.stdout
        return Job(Path(run_dir[1]), job_id[1], done.stdout + done.stderr, self)

    def warn(self, job: Job) -> None:
        """What SLURM sends before a time limit or a preemption, now."""
        self("scancel", "--batch", "--signal=USR2", job.job_id)

    def wait_for_nodes(self) -> None:
        """Waits until both nodes take jobs."""
        deadline = time.monotonic() + PATIENCE
        while self("sinfo", "-h", "-p", "debug", "-t", "idle", "-o", "%D").strip() != "2":
            assert time.monotonic() < deadline, self("sinfo", "-N", "-l")
            time.sleep(0.2)


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """The cluster, started once; skips where SLURM is not installed, and fails there when CI=1."""
    why = cluster.missing()
    needs(not why, str(why))
    # Not below pytest's own folder: the paths of sockets have to be short.
    lab = Lab(Path(tempfile.mkdtemp(prefix="ortlaunch-lab-", dir="/tmp")), free_ports())
    # munged insists on it.
    lab.folder.chmod(0o711)
    try:
        cluster.up(lab)
        yield Slurm(lab)
    finally:
        cluster.down(lab)
        shutil.rmtree(lab.folder)


@pytest.fixture(autouse=True)
def quiet_cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test leaves jobs for the next one."""
    yield
    if "slurm" in request.fixturenames:
        slurm = request.getfixturevalue("slurm")
        jobs = slurm("squeue", "-h", "-r", "-o", "%i").split()
        if jobs:
            slurm("scancel", "--full", "--signal=KILL", *jobs)
            slurm("scancel", *jobs)


@pytest.fixture(scope="session")
def mlflow_run() -> Callable[[Job], Any]:
    """Finds the one MLflow run of a job, in the store of the folder where it was submitted."""
    from mlflow import MlflowClient

    def find(job: Job) -> Any:
        client = MlflowClient(f"sqlite:///{job.run_dir.parents[2]}/mlruns.db")
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        runs = client.search_runs(experiments)
        (run,) = [run for run in runs if run.data.tags.get("ortlaunch.run_dir") == str(job.run_dir)]
        return run

    return find


def free_ports() -> int:
    """Where 100 ports begin of which the first is free."""
    for base in range(17200, 20000, 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", base))
            except OSError:
                continue
            return base
    raise AssertionError("no free ports for a cluster")
