"""A run that is found, looked at, stopped and gone on with from another terminal."""

from __future__ import annotations

import json

import pytest

from tests.support.stuck import stuck_model
from tests.support.waiting import until

LONG = ("model=mlp", "backend=eager", "train.steps=100000", "train.log_every=20")


def the_run(launch, folder):
    """The newest run as `ortlaunch jobs` has it."""
    return json.loads(launch(folder, "jobs", "--json", "--root", "runs").stdout)[0]


def test_cancel_leaves_a_checkpoint_from_which_the_run_goes_on(start, launch, tmp_path, leftovers, mlflow_run):
    running = start(tmp_path, *LONG, "name=to be stopped")
    run_dir = running.wait_for_training()
    row = the_run(launch, tmp_path)
    assert (row["state"], row["name"], row["steps"]) == ("running", "to be stopped", 100000)
    assert row["step"] >= 1
    assert "step 1  loss" in launch(tmp_path, "logs", row["run_id"], "--log", "steps").stdout

    cancelled = launch(tmp_path, "cancel", "to be stopped")
    assert cancelled.returncode == 0, cancelled.report
    assert f"ortlaunch resume {row['run_id']}" in cancelled.stdout
    # cancel has waited for the launcher's end, and for that of the workers with it.
    assert running.process.poll() is not None
    until(lambda: leftovers(run_dir) == [])
    result = running.finish()
    assert (result.returncode, result.status) == (130, "KILLED"), result.report
    told = mlflow_run(result)[1]
    assert told.info.status == "KILLED" and int(told.data.tags["ortlaunch.stopped_at_step"]) > 0
    stopped = the_run(launch, tmp_path)
    assert stopped["state"] == "stopped"
    assert stopped["checkpoint"] == f"step-{stopped['step']:08d}"

    again = launch(tmp_path, "resume", row["run_id"], f"train.steps={stopped['step'] + 5}")
    assert again.returncode == 0, again.report
    finished = the_run(launch, tmp_path)
    assert (finished["state"], finished["step"]) == ("finished", stopped["step"] + 5)
    assert mlflow_run(again)[1].data.tags["ortlaunch.stopped_at_step"] == ""
    assert "is over already: finished" in launch(tmp_path, "cancel", row["run_id"]).stdout


@pytest.mark.nightly
def test_cancel_at_once_waits_for_no_step(start, launch, tmp_path, leftovers):
    """Neither for one that never ends."""
    running = start(tmp_path, *stuck_model(tmp_path))
    run_dir = running.wait_for_training()
    run_id = run_dir.name[-6:]
    patient = launch(tmp_path, "cancel", run_id, "--wait", "2")
    assert patient.returncode == 1
    assert f"ortlaunch cancel {run_id} --now" in patient.stdout
    assert the_run(launch, tmp_path)["state"] == "stopping"
    cancelled = launch(tmp_path, "cancel", run_id, "--now")
    assert cancelled.returncode == 0, cancelled.report
    assert "no checkpoint" in cancelled.stdout
    assert running.finish().status == "KILLED"
    assert the_run(launch, tmp_path)["state"] == "killed"
    until(lambda: leftovers(run_dir) == [])
