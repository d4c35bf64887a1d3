"""A run that is stopped from outside: it ends soon, is recorded as stopped, and leaves no process behind.

CI has the first signal in test_attach.py, ``cancel`` in test_follow.py, and every phase with a stand-in in
test_local_faults.py.
"""

from __future__ import annotations

import os
import signal
import time

import pytest

from ortlaunch.follow.status import look
from ortlaunch.run.folders import folder_at
from tests.integration.conftest import RUN_SECONDS, journal
from tests.support.servers import silent
from tests.support.stuck import loading_model, stuck_model
from tests.support.waiting import until

LONG = ("model=mlp", "backend=eager", "train.steps=100000", "train.log_every=50")
SECONDS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stop")


@pytest.mark.nightly
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_run(start, folder, leftovers, mlflow_run, number, code):
    """128 + the signal; KILLED in journal and MLflow; no worker is left."""
    running = start(folder, *LONG)
    run_dir = running.wait_for_training()
    assert leftovers(run_dir)
    # To the whole foreground group, as a terminal sends Ctrl-C.
    os.killpg(running.process.pid, number)
    result = running.finish()
    assert result.returncode == code, result.report
    assert result.status == "KILLED"
    assert mlflow_run(result)[1].info.status == "KILLED"
    assert "Traceback" not in result.stdout + result.stderr
    until(lambda: leftovers(run_dir) == [])


@pytest.mark.parametrize(
    "keeps", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["with checkpoints", "without"]
)
def test_a_second_ctrl_c_stops_at_once(start, tmp_path, leftovers, keeps):
    """The step that the first one waits for never ends."""
    running = start(tmp_path, *stuck_model(tmp_path), *(["train.checkpoint_every=1"] if keeps else []))
    run_dir = running.wait_for_training()
    running.process.send_signal(signal.SIGINT)
    time.sleep(3)
    assert running.process.poll() is None
    assert leftovers(run_dir)
    running.process.send_signal(signal.SIGINT)
    result = running.finish()
    assert result.returncode == 130, result.report
    assert "finishing the step and writing a checkpoint (again to stop at once)" in result.stdout
    assert result.status == "KILLED"
    assert "ortlaunch.resumable" not in result.tags
    until(lambda: leftovers(run_dir) == [])
    way_on = f"ortlaunch resume {run_dir}" if keeps else "no checkpoint was written; train.checkpoint_every=N"
    assert f"go on:      {way_on}" in result.stdout


@pytest.mark.nightly
def test_a_third_ctrl_c_waits_for_mlflow_no_longer_and_says_how_it_ended(start, tmp_path):
    model = [word for word in stuck_model(tmp_path) if word != "tracking=none"]
    with silent() as uri:
        running = start(tmp_path, *model, "train.checkpoint_every=1", f"tracking.uri={uri}")
        run_dir = running.wait_for_training()
        running.process.send_signal(signal.SIGINT)
        wait_until((run_dir / "STOP").exists)
        running.process.send_signal(signal.SIGINT)
        stop_sending(running, run_dir)
        result = running.finish(SECONDS)
    assert result.returncode == 130, result.report
    assert "Traceback" not in result.stdout + result.stderr
    assert f"go on:      ortlaunch resume {run_dir}" in result.stdout
    assert f"send them:  ortlaunch sync {run_dir}" in result.stdout


@pytest.mark.nightly
def test_ctrl_c_behind_the_last_step_ends_a_sweep_too(start, tmp_path):
    """The run has finished and waits for MLflow alone; the next one does not begin."""
    small = ("model=mlp", "backend=eager", "train.steps=2", "optimizer.lr=0.1,0.2", "--multirun")
    with silent() as uri:
        running = start(tmp_path, *small, f"tracking.uri={uri}", "tracking.flush_seconds=20")
        stop_sending(running, running.wait_for_training())
        result = running.finish(RUN_SECONDS)
    assert result.returncode == 130, result.report
    assert "finished after" in result.stdout and "sweep: " in result.stdout
    assert len(list(tmp_path.glob("runs/*/2*"))) == 1


def wait_until(is_so):
    deadline = time.monotonic() + RUN_SECONDS
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.1)


def stop_sending(running, run_dir):
    """Ctrl-C, once the run has its end and only MLflow is waited for."""
    wait_until(lambda: journal(run_dir)[-1]["event"] == "end")
    time.sleep(1)
    assert running.process.poll() is None
    running.process.send_signal(signal.SIGINT)


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["ctrl-c", "cancel", "sigterm"])
def test_a_stop_before_the_first_step_has_nothing_to_wait_for_and_reads_stopped(
    start, launch, tmp_path, leftovers, way
):
    running = start(tmp_path, *loading_model(tmp_path))
    wait_until(lambda: list(tmp_path.glob("loading")))
    if way == "cancel":
        (run_dir,) = tmp_path.glob("runs/*/2*")
        cancelled = launch(tmp_path, "cancel", run_dir.name[-6:])
        assert cancelled.returncode == 0, cancelled.report
        assert f"stopped before its first step. Go on with: ortlaunch resume {run_dir.name[-6:]}" in cancelled.stdout
    else:
        running.process.send_signal(signal.SIGINT if way == "ctrl-c" else signal.SIGTERM)
    result = running.finish()
    assert result.returncode == (143 if way == "sigterm" else 130), result.report
    assert "stopped after" in result.stdout
    assert result.status == "KILLED"
    row = look(folder_at(result.run_dir)).row
    assert (row.state.value, row.reason, row.is_over) == ("stopped", "before its first step", True)
    assert result.tags["ortlaunch.stopped_at_step"] == "0", "for compare"
    until(lambda: leftovers(result.run_dir) == [])


@pytest.mark.nightly
def test_a_run_that_goes_on_and_is_stopped_while_it_loads_is_at_its_checkpoint(start, launch, tmp_path, leftovers):
    model = loading_model(tmp_path)
    (tmp_path / "go").touch()
    assert launch(tmp_path, *model, "train.steps=4", "train.checkpoint_every=2").returncode == 0
    (run_dir,) = tmp_path.glob("runs/*/2*")
    for file in ("go", "loading"):
        (tmp_path / file).unlink()
    running = start(tmp_path, "resume", str(run_dir), "train.steps=8")
    wait_until(lambda: list(tmp_path.glob("loading")))
    running.process.send_signal(signal.SIGINT)
    result = running.finish()
    assert f"go on:      ortlaunch resume {run_dir}" in result.stdout, result.report
    row = look(folder_at(run_dir)).row
    assert (row.state.value, row.reason, row.step) == ("stopped", "at step 4", 4)
    (tmp_path / "go").touch()
    assert launch(tmp_path, "resume", str(run_dir)).returncode == 0
    row = look(folder_at(run_dir)).row
    assert (row.state.value, row.step) == ("finished", 8)
