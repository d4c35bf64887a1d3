"""What stands in MLflow of runs that are in the queue."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import save_config, to_config
from ortlaunch.launch.queue.announce import destinations
from ortlaunch.launch.queue.attempt import send_all
from ortlaunch.launch.queue.submission import announce
from ortlaunch.launch.slurm.plan import settled
from ortlaunch.launch.slurm.submit import submission_environment
from ortlaunch.run.journal import Journal
from ortlaunch.tracking.trackers import public
from tests.support.servers import free_port


def submitted(folder: Path, *words: str) -> Path:
    """The folder of a run that was just written."""
    (folder / "logs").mkdir(parents=True)
    save_config(public(settled(to_config(compose(["launcher=slurm", *words])))), folder / "config.yaml")
    journal = Journal(folder / "journal.jsonl")
    journal.start("default", folder.name, folder.name)
    journal.close()
    return folder


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, the process that announces takes a minute for what takes it some seconds."""
    monkeypatch.setattr("ortlaunch.launch.queue.submission._ANNOUNCE_SECONDS", 250)


def test_all_are_sent_and_the_firsts_id_is_said(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    store = f"sqlite:///{tmp_path}/mlruns.db"
    words = [f"tracking.uri={store}", f"tracking.artifacts={tmp_path}/artifacts"]
    folders = [submitted(tmp_path / name, *words) for name in ("sweep", "one", "two")]
    made = to_config(compose(["launcher=slurm", *words]))
    said = announce(folders, made, submission_environment(made))
    runs = MlflowClient(store).search_runs(["1"])
    assert {run.info.run_name for run in runs} == {"sweep", "one", "two"}
    (first,) = (run.info.run_id for run in runs if run.info.run_name == "sweep")
    assert said == f"mlflow run {first}"


def test_what_is_not_sent_is_left_to_the_jobs(tmp_path: Path) -> None:
    words = [f"tracking.uri=http://127.0.0.1:{free_port()}", "tracking.timeout_seconds=1"]
    folders = [submitted(tmp_path / name, *words) for name in ("sweep", "one")]
    made = to_config(compose(["launcher=slurm", *words]))
    assert announce(folders, made, submission_environment(made)) == "(2 not yet sent: the job will)"


def test_without_mlflow_there_is_nothing_to_say(tmp_path: Path) -> None:
    folder = submitted(tmp_path / "one", "tracking=none")
    assert announce([folder], to_config(compose(["launcher=slurm", "tracking=none"])), {}) == ""
    assert send_all(folder) == 0


@pytest.mark.parametrize("uri", ["http://ann:hunter2@team:5000", "postgresql://ann:hunter2@db/mlflow"])
def test_the_password_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str) -> None:
    folder = submitted(tmp_path / "one", f"tracking.uri='{uri}'", "tracking.artifacts=/a")
    assert "hunter2" not in (folder / "config.yaml").read_text()
    monkeypatch.setenv("ORTLAUNCH_TRACKING_URI", uri)
    (found,) = destinations(folder)
    assert (found.uri, found.artifacts) == (uri, "/a")


def test_a_jobs_verdict_stands_alone_on_standard_output(tmp_path: Path) -> None:
    """The batch script takes all that is printed there for its next step."""
    words = [f"tracking.uri=sqlite:///{tmp_path}/mlruns.db", f"tracking.artifacts={tmp_path}/artifacts"]
    folder = submitted(tmp_path / "one", *words)
    done = subprocess.run(
        [sys.executable, "-m", "ortlaunch.launch.slurm.job", "announce", str(folder)],
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == ""
    assert "mlflow run " in done.stderr
