"""A sweep's runs and the run under which they stand in MLflow, whoever sends what first."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.sweeps import run_name, swept_keys, swept_name
from ortlaunch.config.schema import MlflowConfig
from ortlaunch.run.journal import Journal
from ortlaunch.run.sweep import SweepTask, create, find_sweep, join, note_end, tags_of
from ortlaunch.tracking.relay import sync
from tests.compare.conftest import collected

ROOT = Path(__file__).parents[2]


@pytest.fixture
def sweep_of(tmp_path: Path, request: pytest.FixtureRequest):
    """Makes a sweep with runs that have begun, none of it sent."""

    def make(runs: int):
        experiment = request.node.name
        root = tmp_path / "runs" / experiment
        sweep = create(root / "multirun-20260101-000000", "sweep-x", experiment, {"name": "none"}, ["ortlaunch"])
        folders = []
        for number in range(runs):
            run_dir = root / f"20260101-000000-run-{number:06x}"
            run_dir.mkdir()
            join(run_dir, SweepTask(sweep.folder, number))
            journal = Journal(run_dir / "journal.jsonl")
            journal.start(experiment, f"run-{number}", f"{number:06x}")
            journal.tags(tags_of(run_dir))
            journal.metrics(1, {"train/loss": 1.0, "summary/tokens_per_second_median": 100.0 + number})
            folders.append(run_dir)
        sweep.write(folders, complete=True)
        return sweep, folders

    return make


def statuses(sweep: Any) -> list[str]:
    events = [json.loads(line) for line in sweep.journal.read_text().splitlines()]
    return [event["status"] for event in events if event["event"] == "end"]


def test_runs_stand_under_one_parent_though_none_was_sent_before(sweep_of, store: MlflowConfig, client) -> None:
    sweep, folders = sweep_of(4)
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda folder: sync(folder, store), folders))
    assert [result.message for result in results] == [""] * 4
    runs = [client(store.uri).get_run(result.mlflow_run_id) for result in results]
    (parent,) = {run.data.tags["mlflow.parentRunId"] for run in runs}
    parent_run = client(store.uri).get_run(parent)
    assert (parent_run.info.run_name, parent_run.info.status) == ("sweep-x", "RUNNING")
    assert sync(sweep.folder, store).mlflow_run_id == parent


def test_the_last_run_ends_the_sweep_as_its_runs_ended(sweep_of, store: MlflowConfig, client) -> None:
    sweep, (first, second, third) = sweep_of(3)
    assert note_end(first, "FINISHED") is None
    assert note_end(second, "FAILED") is None
    assert statuses(sweep) == []
    assert note_end(third, "FINISHED") == sweep.folder
    assert statuses(sweep) == ["FAILED"]
    result = sync(sweep.folder, store)
    assert client(store.uri).get_run(result.mlflow_run_id).info.status == "FAILED"
    # The run that failed is gone on with.
    assert note_end(second, "FINISHED") == sweep.folder
    sync(sweep.folder, store)
    assert client(store.uri).get_run(result.mlflow_run_id).info.status == "FINISHED"


def test_no_sweep_ends_before_all_its_runs_are_known(sweep_of) -> None:
    sweep, (only,) = sweep_of(1)
    sweep.write([only], complete=False)
    assert note_end(only, "FINISHED") is None
    assert statuses(sweep) == []


def test_a_run_whose_sweeps_folder_is_gone_stands_alone(sweep_of, store: MlflowConfig, client, tmp_path: Path) -> None:
    sweep, (only,) = sweep_of(1)
    sweep.folder.rename(tmp_path / "elsewhere")
    assert note_end(only, "FINISHED") is None
    result = sync(only, store)
    assert result.sent
    assert "mlflow.parentRunId" not in client(store.uri).get_run(result.mlflow_run_id).data.tags


def test_compare_shows_the_runs_of_a_sweep_and_never_its_parent(sweep_of, store: MlflowConfig, request) -> None:
    sweep, folders = sweep_of(3)
    for folder in [*reversed(folders), sweep.folder]:
        sync(folder, store)
    names = ["run-0", "run-1", "run-2"]
    for asked in (str(sweep.folder), "sweep-x", sweep.run_id):
        rows = collected(store, sweep=asked, experiment=request.node.name).rows
        assert [row.name for row in rows] == names, asked
    latest = collected(store, experiment=request.node.name, last=3).rows
    assert sorted(row.name for row in latest) == names
    with pytest.raises(RequestError, match="no sweep 'run-0' with runs"):
        collected(store, sweep="run-0", experiment=request.node.name)


def test_an_embedded_store_that_was_lost_gets_all_runs_again(sweep_of, store: MlflowConfig, tmp_path: Path) -> None:
    """In a process of its own, because this one has the lost file open."""
    _, folders = sweep_of(2)
    database = tmp_path / "lost.db"
    lost = replace(store, uri=f"sqlite:///{database}", artifacts=str(tmp_path / "mlartifacts"))
    for folder in folders:
        (folder / "config.yaml").write_text(yaml.safe_dump({"tracking": asdict(lost)}))
        assert sync(folder, lost).sent
    database.unlink()
    again = [sys.executable, "-m", "ortlaunch", "sync", "--all", str(folders[0].parent)]
    done = subprocess.run(
        again, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": 3 events sent") == 2, done.stdout
    with closing(sqlite3.connect(database)) as found:
        ids = dict(found.execute("select name, run_uuid from runs"))
        parents = found.execute("select distinct value from tags where key = 'mlflow.parentRunId'").fetchall()
    assert set(ids) == {"sweep-x", "run-0", "run-1"} and parents == [(ids["sweep-x"],)]


def test_a_sweep_is_found_by_its_names(sweep_of, tmp_path: Path) -> None:
    sweep, _ = sweep_of(1)
    (sweep.folder / "job.json").write_text('{"job_id": "77"}')
    for asked in (str(sweep.folder), sweep.folder.name, "sweep-x", sweep.run_id, "77"):
        assert find_sweep(asked, [tmp_path / "runs"]) == sweep.folder, asked
    assert find_sweep("78", [tmp_path / "runs"]) is None
    older = sweep.folder.with_name("multirun-z")
    shutil.copytree(sweep.folder, older)
    os.utime(older / "sweep.json", (1, 1))
    assert find_sweep("sweep-x", [tmp_path / "runs"]) == sweep.folder, "the newest of one name"


def test_names_say_what_a_sweep_varies() -> None:
    words = ["model=mlp,gpt2", "optimizer.lr=0.1,0.2", "train.steps=5", "seed=range(1,3)", "-m"]
    assert swept_name(words, None) == "sweep-model-optimizer.lr-seed"
    assert swept_name(words, "mine") == "sweep-mine"
    lists = ["model.params.hidden_sizes=[32,64]", "data.path='a.txt,b.txt'", "+a.b={x:1,y:2}", "backend=eager,ort"]
    assert swept_keys(lists) == ["backend"], "a list is one value"
    with pytest.raises(RequestError, match=r"name=\[1: not understood"):
        swept_keys(["name=[1"])
    made = ["model=mlp", "optimizer.lr=0.2", "train.steps=5", "seed=1"]
    assert run_name("mlp-ort-ddp", ["optimizer.lr", "seed"], made) == "mlp-ort-ddp-lr=0.2-seed=1"
