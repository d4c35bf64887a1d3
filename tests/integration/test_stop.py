"""A run that is stopped from outside: it ends soon, is recorded as stopped, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import time

import pytest

LONG = ("model=mlp", "backend=eager", "train.steps=100000", "train.log_every=50")
SECONDS = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stop")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_run(start, folder, leftovers, mlflow_run, number, code):
    """128 + the signal, within 30 s; KILLED in journal and MLflow; no worker is left."""
    running = start(folder, *LONG)
    run_dir = running.wait_for_training()
    assert leftovers(run_dir)
    # To the whole foreground group, as a terminal sends Ctrl-C.
    os.killpg(running.process.pid, number)
    result = running.finish(SECONDS)
    assert result.returncode == code, result.report
    assert result.status == "KILLED"
    assert mlflow_run(result)[1].info.status == "KILLED"
    assert "Traceback" not in result.stdout + result.stderr
    assert leftovers(run_dir) == []


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
