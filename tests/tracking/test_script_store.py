"""What a script logs by MLflow's own interface gets into its own run, whatever run or experiment it asks for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import mlflow
import pytest

from ortlaunch.run import events
from ortlaunch.run.journal import iterate
from ortlaunch.run.run import Run
from ortlaunch.tracking.script_run import ScriptStore

KEY = "20260101-120000-1a2b3c"
PASSWORD = "hunter2hunter2"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A run in a folder with a name that a URI must quote; this process is its script."""
    run = Run(tmp_path / "a run % ü" / "20260101-120000-train-1a2b3c")
    run.logs.mkdir(parents=True)
    with run.journal() as journal:
        journal.start("experiment", "train", "1a2b3c")
    before = mlflow.get_tracking_uri()
    monkeypatch.setenv("MLFLOW_RUN_ID", KEY)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "experiment")
    mlflow.set_tracking_uri(f"ortlaunch://{quote(str(run.path))}")
    yield run
    mlflow.end_run()
    mlflow.set_tracking_uri(before)


def values(run: Run, kind: type[events.Event]) -> list[object]:
    return [event.values for event in iterate(run.journal_file) if isinstance(event, kind)]  # type: ignore[attr-defined]


def test_runs_metrics_params_tags_and_files_are_those_of_the_run(run: Run, tmp_path: Path) -> None:
    mlflow.set_experiment("a name of its own")
    with mlflow.start_run(run_name="mine") as first:
        mlflow.log_params({"width": 3, "act": "gelu"})
        mlflow.log_metric("loss", 0.5, step=1)
        mlflow.log_metrics({"loss": float("nan"), "acc": 1.0}, step=2)
        mlflow.set_tags({"who": "me", "ortlaunch.backend": "ort"})
        (tmp_path / "table.csv").write_text("a,b")
        mlflow.log_artifact(str(tmp_path / "table.csv"), "tables")
    # MLFLOW_RUN_ID is gone by now, so that this would be a second run.
    with mlflow.start_run() as second, mlflow.start_run(nested=True) as nested:
        mlflow.log_metric("loss", 0.25, step=3)
    assert {first.info.run_id, second.info.run_id, nested.info.run_id} == {KEY}
    assert [one for event in values(run, events.Measured) for one in event] == ["loss", "loss", "acc", "loss"]
    assert values(run, events.ParamsSet) == [{"width": "3", "act": "gelu"}]
    assert values(run, events.Tagged) == [{"who": "me"}]
    assert (run.artifacts / "tables" / "table.csv").read_text() == "a,b"
    seen = mlflow.MlflowClient().get_run(KEY).data
    assert (seen.metrics["loss"], seen.params["width"], seen.tags["who"]) == (0.25, "3", "me")
    # Its end is ortlaunch's to say.
    assert run.state().ended is None


def test_threads_log_at_once_and_nothing_is_lost(run: Run) -> None:
    store = ScriptStore(run.path)
    steps = [
        threading.Thread(target=lambda first=first: [_log(store, step) for step in range(first, first + 200)])
        for first in range(0, 1600, 200)
    ]
    for thread in steps:
        thread.start()
    for thread in steps:
        thread.join()
    found = [event.step for event in iterate(run.journal_file) if isinstance(event, events.Measured)]
    assert sorted(found) == list(range(1600))


def _log(store: ScriptStore, step: int) -> None:
    store.log_batch("", [mlflow.entities.Metric("loss", 1.0, 0, step)], [], [])


def test_a_further_node_writes_a_file_of_its_own(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    size = run.journal_file.stat().st_size
    monkeypatch.setenv("GROUP_RANK", "1")
    _log(ScriptStore(run.path), 3)
    assert (run.journal_file.stat().st_size, run.spool_files()) == (size, [run.spool_file(1)])


def test_secrets_of_a_script_do_not_reach_the_journal(run: Run) -> None:
    mlflow.log_params({"password": PASSWORD, "url": f"https://me:{PASSWORD}@host"})
    assert PASSWORD not in run.journal_file.read_text()


def test_what_the_run_has_not_is_refused_with_a_remedy(run: Run) -> None:
    with pytest.raises(mlflow.MlflowException, match="save the model into the folder ORTLAUNCH_CHECKPOINTS"):
        mlflow.MlflowClient().create_logged_model("0", "model")
