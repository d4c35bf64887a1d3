"""Runs on a real cluster, steered from the login node: cancelled, gone on with, in sweeps and in chains."""

from __future__ import annotations

import itertools
import json
import re
import time
from pathlib import Path

import pytest

PLAIN = ("model=mlp", "backend=eager", "trainer=ddp", "train.log_every=1", "launcher.preflight=false")
ENDLESS = (*PLAIN, "train.steps=100000")
SMALL = ("launcher=slurm", "launcher.workers_per_node=1", *PLAIN)
PATIENCE = 400

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steered")
    (folder / "runs").mkdir()
    return folder


def ortlaunch(slurm, folder, *words):
    """Standard output of a command that must succeed."""
    done = slurm.run(folder, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rows_of(slurm, folder, *words):
    return json.loads(ortlaunch(slurm, folder, "jobs", "--json", "--all", "--root", "runs", *words))


def wait_for_rows(slurm, folder, holds, *words):
    deadline = time.monotonic() + PATIENCE
    while not holds(rows := rows_of(slurm, folder, *words)):
        assert time.monotonic() < deadline, rows
        time.sleep(1)
    return rows


def mlflow_runs(folder):
    """All MLflow runs by the folder that they stand for."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlruns.db")
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    return {run.data.tags["ortlaunch.run_dir"]: run for run in runs}


def test_cancel_and_resume_over_two_nodes(slurm, folder, mlflow_run):
    job = slurm.submit(folder, *ENDLESS, "name=cancelled")
    job.wait_for_step(5)
    (row,) = [row for row in rows_of(slurm, folder) if row["job_id"] == job.job_id]
    assert (row["state"], row["nodes"], row["node_list"]) == ("running", 2, "node[1-2]")
    assert "SLURM job" in ortlaunch(slurm, folder, "status", job.job_id)
    assert "step 5  loss" in ortlaunch(slurm, folder, "logs", "cancelled", "--log", "steps")

    said = ortlaunch(slurm, folder, "cancel", job.job_id)
    step = int(re.search(r"stopped at step (\d+) with a checkpoint", said)[1])
    (row,) = [row for row in rows_of(slurm, folder) if row["name"] == "cancelled"]
    assert (row["state"], row["step"]) == ("stopped", step)
    assert (job.state, job.status) != ("CANCELLED", "unfinished")
    before = mlflow_run(job)
    assert before.info.status == "KILLED"

    said = ortlaunch(slurm, folder, "resume", job.job_id, f"train.steps={step + 5}")
    second = re.search(r"as job (\d+)", said)[1]
    assert second != job.job_id
    wait_for_rows(slurm, folder, lambda rows: any(r["job_id"] == second and r["state"] == "finished" for r in rows))
    job.wait_until(lambda: mlflow_run(job).info.status == "FINISHED", "end in MLflow")
    assert mlflow_run(job).info.run_id == before.info.run_id
    assert sorted(job.losses) == list(range(1, step + 6))
    assert all(len(values) == 1 for values in job.losses.values()), "a step was made twice"
    steps = re.findall(r"^step (\d+) ", ortlaunch(slurm, folder, "logs", second, "--log", "steps"), re.MULTILINE)
    assert [int(number) for number in steps] == list(range(1, step + 6))


def test_a_chain_waits_also_while_the_first_is_queued_again(slurm, folder):
    first = slurm.submit(folder, *PLAIN, "train.steps=150", "name=first", 'launcher.extra=["--hold"]')
    second = slurm.submit(folder, *PLAIN, "train.steps=5", "name=second", "+after=first")
    third = slurm.submit(folder, *PLAIN, "train.steps=5", "name=third", f"+after=first,{second.job_id}")
    slurm("scontrol", "release", first.job_id)
    first.wait_for_step(5)
    slurm.warn(first)
    first.wait_until(lambda: len(first.attempts) == 2, "second attempt")
    assert (second.state, third.state) == ("PENDING", "PENDING")
    (row,) = [row for row in rows_of(slurm, folder) if row["name"] == "second"]
    assert (row["state"], row["reason"]) == ("pending", "waits for another job")
    third.wait_for_end()
    assert [job.status for job in (first, second, third)] == ["FINISHED"] * 3, second.report
    assert second.attempts[0]["began"] > first.attempts[-1]["ended"]
    assert third.attempts[0]["began"] > second.attempts[-1]["ended"]
    # One that has finished is not waited for.
    assert "--dependency" not in ortlaunch(slurm, folder, *SMALL, "launcher.dry_run=true", "+after=first")


def test_a_run_that_did_not_finish_starts_none_after_it(slurm, folder):
    first = slurm.submit(folder, *ENDLESS, "name=to be cancelled")
    second = slurm.submit(folder, *PLAIN, "train.steps=5", "name=never", "+after=to be cancelled")
    first.wait_for_step(3)
    ortlaunch(slurm, folder, "cancel", first.job_id)
    rows = wait_for_rows(slurm, folder, lambda rows: all(r["is_over"] for r in rows if r["name"] == "never"))
    (row,) = [row for row in rows if row["name"] == "never"]
    assert (row["state"], row["reason"]) == ("killed", "the run it waited for did not finish")
    assert second.attempts == []
    refused = slurm.run(folder, *SMALL, "+after=to be cancelled")
    assert refused.returncode == 2
    assert "is stopped (at step" in refused.stderr


def test_a_sweep_is_one_array_under_one_parent(slurm, folder):
    words = ("optimizer.lr=0.001,0.002,0.003", "train.steps=8", "launcher.array_limit=1", "--multirun")
    known = {row["run_id"] for row in rows_of(slurm, folder)}
    said = ortlaunch(slurm, folder, *SMALL, *words)
    array = re.search(r"as job (\d+): 3 runs of 1 node\(s\), 1 at once", said)[1]
    sweep = Path(re.search(r"^sweep: +(.*)$", said, re.MULTILINE)[1])
    # Known to MLflow before the first one starts.
    runs = mlflow_runs(folder)
    parent = runs[str(sweep)]
    rows = rows_of(slurm, folder, "--sweep", array)
    assert {row["job_id"] for row in rows} == {f"{array}_{task}" for task in range(3)}
    assert not known & {row["run_id"] for row in rows}
    assert sorted(row["name"] for row in rows) == [f"mlp-eager-ddp-lr=0.00{number}" for number in (1, 2, 3)]
    for row in rows:
        assert runs[row["run_dir"]].data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert runs[rows[0]["run_dir"]].data.tags["ortlaunch.state"] == "queued"
    assert parent.info.status == "RUNNING"

    wait_for_rows(slurm, folder, lambda rows: all(r["state"] == "finished" for r in rows), "--sweep", array)
    deadline = time.monotonic() + 60
    while mlflow_runs(folder)[str(sweep)].info.status != "FINISHED":
        assert time.monotonic() < deadline
        time.sleep(1)
    attempts = sorted(
        (one["began"], one["ended"])
        for row in rows
        for one in json.loads((Path(row["run_dir"]) / "history.json").read_text())["attempts"]
    )
    assert all(later[0] >= earlier[1] for earlier, later in itertools.pairwise(attempts)), attempts
    compared = json.loads(ortlaunch(slurm, folder, "compare", "--sweep", str(sweep), "--format", "json"))
    assert [run["run"] for run in compared["runs"]] == [f"mlp-eager-ddp-lr=0.00{number}" for number in (1, 2, 3)]


def test_a_sweep_is_cancelled_as_a_whole(slurm, folder):
    words = ("train.steps=100000", "seed=1,2,3", "launcher.array_limit=1", "name=endless", "--multirun")
    said = ortlaunch(slurm, folder, *SMALL, *words)
    array = re.search(r"as job (\d+)", said)[1]
    sweep = re.search(r"^sweep: +(.*)$", said, re.MULTILINE)[1]
    wait_for_rows(slurm, folder, lambda rows: any((r["step"] or 0) > 3 for r in rows), "--sweep", array)
    ortlaunch(slurm, folder, "cancel", "sweep-endless")
    rows = rows_of(slurm, folder, "--sweep", array)
    # In the order of their numbers; none of those that waited took the place of the one that was stopped.
    assert [row["state"] for row in rows] == ["stopped", "killed", "killed"]
    deadline = time.monotonic() + 60
    while {run.info.status for run in mlflow_runs(folder).values() if _belongs(run, sweep)} != {"KILLED"}:
        assert time.monotonic() < deadline
        time.sleep(1)


def _belongs(run, sweep):
    return sweep in (run.data.tags["ortlaunch.run_dir"], run.data.tags.get("ortlaunch.sweep"))


def test_a_sweep_of_different_resources_is_refused(slurm, folder):
    refused = slurm.run(folder, *SMALL, "launcher.nodes=1,2", "--multirun")
    assert refused.returncode == 2
    assert "launcher.nodes differs" in refused.stderr
    assert not slurm("squeue", "-h").strip()
