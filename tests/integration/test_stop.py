"""A run that is stopped from outside: it ends soon, is recorded as stopped, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.support.stuck import stuck_model

LONG = ("model=mlp", "backend=eager", "train.steps=100000", "train.log_every=50")
SECONDS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stop")


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
    assert leftovers(run_dir) == []


def test_a_second_ctrl_c_stops_at_once(start, tmp_path, leftovers):
    """The step that the first one waits for never ends."""
    running = start(tmp_path, *stuck_model(tmp_path))
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
    assert leftovers(run_dir) == []


def test_ctrl_c_before_the_first_step_has_nothing_to_wait_for(start, folder, leftovers):
    running = start(folder, *LONG, "tracking=none")
    known = set(folder.glob("runs/*/*/logs/torchrun.log"))
    deadline = time.monotonic() + SECONDS
    while set(folder.glob("runs/*/*/logs/torchrun.log")) <= known and time.monotonic() < deadline:
        time.sleep(0.05)
    running.process.send_signal(signal.SIGINT)
    result = running.finish()
    assert result.returncode == 130, result.report
    assert result.status == "KILLED"
    assert leftovers(result.run_dir) == []


def test_workers_end_with_a_launcher_that_is_killed(start, folder, leftovers):
    """SIGKILL leaves the launcher no word; the kernel tells torchrun, and torchrun its workers."""
    running = start(folder, *LONG, "tracking=none")
    run_dir = running.wait_for_training()
    assert leftovers(run_dir)
    running.process.kill()
    deadline = time.monotonic() + SECONDS
    while (left := leftovers(run_dir)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []
