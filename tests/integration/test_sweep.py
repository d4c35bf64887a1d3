"""A sweep on this machine: its runs under one parent in MLflow, which ends as they ended."""

from __future__ import annotations

import json

import pytest

SMALL = ("model=mlp", "backend=eager", "trainer=single", "train.steps=4", "train.log_every=1")


def mlflow_runs(folder):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlruns.db")
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    return {run.info.run_name: run for run in runs}


def test_runs_of_a_sweep_stand_under_one_parent(sweep, ask):
    runs = mlflow_runs(sweep.cwd)
    parent = runs.pop("sweep-backend")
    assert parent.info.status == "FINISHED"
    assert sorted(runs) == ["mlp-eager-ddp", "mlp-ort-ddp"]
    assert {run.data.tags["mlflow.parentRunId"] for run in runs.values()} == {parent.info.run_id}
    compared = json.loads(ask(sweep.cwd, "compare", "--sweep", "sweep-backend", "--format", "json").stdout)
    assert [run["run"] for run in compared["runs"]] == ["mlp-eager-ddp", "mlp-ort-ddp"]


@pytest.mark.parametrize(
    ("words", "others"),
    [
        pytest.param((), {"mlp-eager-single-lr=0.02": "FINISHED"}, id="goes_on"),
        pytest.param(("launcher.fail_fast=true",), {}, id="fail_fast", marks=pytest.mark.nightly),
    ],
)
def test_a_sweep_goes_on_after_a_failure_unless_it_is_asked_to_end(launch, tmp_path, words, others):
    # The first learning rate is no number that a step survives. The last one is refused.
    sgd = ("optimizer=sgd", "train.clip_grad_norm=null", "optimizer.lr=1e30,0.02,-1")
    result = launch(tmp_path, *SMALL, *sgd, *words, "-m")
    assert result.returncode == 1, result.report
    runs = mlflow_runs(tmp_path)
    assert {name: run.info.status for name, run in runs.items()} == {
        "sweep-optimizer.lr": "FAILED",
        "mlp-eager-single-lr=1e+30": "FAILED",
        **others,
    }
    if others:
        assert f"ortlaunch: optimizer.lr=1e+30 failed: exit code 1; see {result.run_dirs[0]}" in result.stderr
        assert "ortlaunch: optimizer.lr=-1 failed: optimizer.lr=-1.0: must be" in result.stderr


def test_a_sweep_that_does_not_compose_leaves_nothing(ask, tmp_path):
    result = ask(tmp_path, *SMALL, "train.steps=0,4", "-m")
    assert result.returncode == 2
    assert "train.steps=0" in result.stderr
    assert not list(tmp_path.glob("runs/*/*/journal.jsonl"))
