"""What a run survives around it: its terminal, its disk, its folder and its store.

``tests/launch/test_local_faults.py`` shows most of this in CI with a stand-in for the workers. Here whole runs are
disturbed, by ``make test-faults``.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from ortlaunch.run.run import Run
from ortlaunch.tracking.sqlite_store import State, look
from tests.faults.test_faults import SmallDisk
from tests.faults.trials import STEPS, WORDS, Trial, end
from tests.integration.conftest import Started
from tests.support.environment import environment
from tests.support.needs import needs


@pytest.mark.nightly
def test_reader_of_the_output_goes_away(start, trial):
    run = start(trial)
    run.reach_some_step()
    run.running.process.stdout.close()
    assert run.running.process.stderr.read() == ""
    assert run.running.process.wait(60) == 0
    run.check_same()
    log = (run.run_dir / "logs" / "rank-0.log").read_text()
    assert "Traceback" not in log


@pytest.mark.nightly
def test_folder_deleted(start, trial):
    run = start(trial)
    run.reach_some_step()
    shutil.rmtree(run.run_dir, ignore_errors=True)
    began = time.monotonic()
    result = run.running.finish()
    assert time.monotonic() - began < 15
    assert (result.returncode, "finished" in result.stdout) == (1, False), result.report
    assert f"{run.run_dir} is gone" in result.stderr and len(result.stderr.splitlines()) == 1, result.report
    run.check_gone()


@pytest.mark.nightly
def test_full_disk_for_the_whole_run_folder(base, trial, tmp_path):
    """Also the journal, the logs and the signs of life cannot be written for a while."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(folder)], capture_output=True)
    needs(mounted.returncode == 0, f"a tmpfs cannot be mounted here: {mounted.stderr.decode().strip()}")
    disk = SmallDisk(folder)
    run = Trial(replace(base, folder=folder), trial)
    try:
        run.reach_some_step(left=STEPS // 2)
        disk.fill(0)
        time.sleep(run.random.uniform(0.5, 2.0))
        disk.clear()
        result = run.running.finish()
        assert result.returncode == 0, result.report
        run.check_same()
    finally:
        end(run)
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("second", [5, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(15) if n != 5)])
def test_ctrl_c_again_and_again_in_the_first_seconds(base, tmp_path, monkeypatch, second):
    """In a new folder, where MLflow makes its store: whatever was cut off, the next command can use the folder."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))  # MLflow makes the store, not a template's copy.
    running = Started(tmp_path, (*WORDS, "tracking=mlflow"))
    try:
        time.sleep(second + 0.5)
        for _ in range(3):
            if running.process.poll() is None:
                running.process.send_signal(signal.SIGINT)
                time.sleep(0.4)
        result = running.finish()
    finally:
        running.end()
    assert "Traceback" not in result.stderr
    for run_dir in result.run_dirs:
        sent = subprocess.run(
            [sys.executable, "-m", "ortlaunch", "sync", str(run_dir)],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert sent.returncode == 0, result.report + sent.stdout + sent.stderr
        assert look(tmp_path / "mlruns.db").state is State.COMPLETE
        assert Run(run_dir).state().ended == result.status
    assert result.run_dirs or result.returncode in (-signal.SIGINT, 130)
