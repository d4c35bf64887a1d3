"""What a run survives: kills, a full disk, damaged bytes, requests to stop, at moments drawn at random.

After each fault the run goes on, by itself or by ``ortlaunch resume``: its losses are those of the undisturbed run, no
process is left, and no checkpoint that was complete has gone.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from ortlaunch.config.tracking_uri import sqlite_uri
from tests.faults.trials import EVERY, SHARDED, STEPS, Trial, end
from tests.integration.conftest import journal
from tests.support.needs import needs


def test_kill_of_a_worker(start, trial):
    """torchrun starts the workers again; the run ends well without anybody's help, in the same MLflow run."""
    run = start(trial, "launcher.max_restarts=1", "tracking=mlflow")
    run.reach_some_step()
    run.random.choice(run.workers()).send_signal(signal.SIGKILL)
    result = run.running.finish()
    assert result.returncode == 0, result.report
    run.check_same()
    rewinds = [event["step"] for event in journal(run.run_dir) if event["event"] == "rewind"]
    assert len(rewinds) == 1 and rewinds[0] % EVERY == 0
    assert mlflow_losses(run.base.folder, run.run_dir) == sorted(run.base.losses.items())


@pytest.mark.nightly
def test_kill_of_the_launcher(start, trial):
    """The workers notice, write a last checkpoint and go. CI has the launcher's kill in test_outage.py."""
    run = start(trial)
    run.reach_some_step()
    run.running.process.kill()
    run.check_gone()
    run.resume()


@pytest.mark.nightly
def test_kill_of_all(start, trial):
    """CI has it while a checkpoint is written."""
    run = start(trial)
    run.reach_some_step()
    run.kill_all()
    run.resume()


def test_kill_while_a_checkpoint_is_written(start, trial):
    run = start(trial)
    run.reach_writing()
    run.kill_all()
    half = list((run.run_dir / "checkpoints").glob("*.partial"))
    result = run.resume()
    for path in half:
        assert path.name in result.stdout, result.report
        # Left as it is, or out of the way of the one that took its place.
        assert path.exists() or path.with_name(f"{path.name}.1").exists()


@pytest.mark.nightly
def test_kill_while_shards_are_written(sharded_base, trial):
    """As above with trainer=fsdp, where no worker has the whole of what the checkpoint holds."""
    run = Trial(sharded_base, trial, *SHARDED)
    try:
        run.reach_writing()
        run.kill_all()
        run.resume()
    finally:
        end(run)


def test_full_disk_while_a_checkpoint_is_written(start, trial, small_disk):
    """Training goes on without that checkpoint, and writes the next one when there is room again."""
    run = start(trial)
    checkpoints = run.run_dir / "checkpoints"
    run.wait_for(lambda: any(checkpoints.glob("step-*/manifest.json")))
    # Less than a checkpoint takes, so that the disk is full at some byte of it; what is removed makes no room.
    leave = run.random.randrange(14_000_000)

    def has_failed():
        small_disk.fill(leave)
        return any("ortlaunch.checkpoint_failure" in event.get("values", {}) for event in journal(run.run_dir))

    run.wait_for(has_failed)
    survivors = run.complete()
    assert survivors, "the complete ones are still there"
    small_disk.clear()
    result = run.running.finish()
    assert result.returncode == 0, result.report
    assert "could not be written, training goes on" in result.stdout
    assert re.search(r"\(\d+ MB are free in ", result.stdout), result.report
    run.check_same()
    assert not list(checkpoints.glob("*.partial"))


@pytest.mark.nightly
def test_damaged_bytes_in_the_newest_checkpoint(start, trial):
    """CI has it in test_resume.py, with workers that stay."""
    run = start(trial)
    run.wait_for(lambda: len(run.complete()) >= 2)
    run.kill_all()
    newest = run.run_dir / "checkpoints" / run.complete()[0]
    file = run.random.choice(sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size))
    data = bytearray(file.read_bytes())
    for _ in range(3):
        data[run.random.randrange(len(data))] ^= run.random.randrange(1, 256)
    file.write_bytes(bytes(data))
    result = run.resume()
    assert f"{newest} is damaged" in result.stdout, result.report
    kept = [path for path in (newest, newest.with_name(f"{newest.name}.aside-1")) if path.exists()]
    assert bytes(data) in [(path / file.relative_to(newest)).read_bytes() for path in kept]


@pytest.mark.nightly
def test_request_to_stop(start, trial):
    """SIGTERM to the launcher, to torchrun or to one worker, or the file STOP, which test_follow.py has in CI."""
    run = start(trial)
    run.reach_some_step(left=STEPS // 2)
    to = run.random.choice(["launcher", "torchrun", "worker", "file"])
    if to == "file":
        (run.run_dir / "STOP").touch()
    elif to == "launcher":
        run.running.process.terminate()
    elif to == "worker":
        run.random.choice(run.workers()).terminate()
    else:
        psutil.Process(run.workers()[0].pid).parent().terminate()
    result = run.running.finish()
    assert result.returncode == {"launcher": 143, "torchrun": 143, "worker": 130, "file": 130}[to], (to, result.report)
    assert result.status == "KILLED"
    assert result.tags["ortlaunch.resumable"] == "true"
    assert "ortlaunch resume" in result.stdout
    stopped = int(result.tags["ortlaunch.stopped_at_step"])
    assert run.complete()[0] == f"step-{stopped:08d}"
    assert not (run.run_dir / "STOP").exists()
    run.check_gone()
    run.resume()


@pytest.mark.nightly
def test_signal_at_any_moment(start, trial, base):
    """SIGTERM or SIGHUP from the command's first moment on. CI has one in
    test_attach.py, and Ctrl-C in the first seconds."""
    run = start(trial)
    number = run.random.choice([signal.SIGTERM, signal.SIGHUP])
    time.sleep(run.random.uniform(0.3, 1.0) * base.seconds)
    run.running.process.send_signal(number)
    result = run.running.finish()
    if "run folder:" not in result.stdout:
        assert result.returncode == -number, "it came before the run began"
        return
    run._run_dir = result.run_dir
    run.check_gone()
    if result.returncode == 128 + number and result.status == "KILLED":
        run.resume()
    else:
        assert result.status == "FINISHED", result.report
        run.check_same()


class SmallDisk:
    """A file system of its own that holds little."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self, leave: int) -> None:
        """Leaves no more than so many bytes."""
        with (self.folder / "filler").open("ab") as file:
            # The run writes meanwhile, so that what was free a moment ago may be more than what is left.
            while (free := self._free()) > leave:
                with suppress(OSError):
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), free - leave)

    def _free(self) -> int:
        status = os.statvfs(self.folder)
        return status.f_bavail * status.f_frsize

    def clear(self) -> None:
        """Makes room again."""
        (self.folder / "filler").unlink()


@pytest.fixture
def small_disk(tmp_path, base, monkeypatch):
    """The checkpoints of the next run lie on a small tmpfs."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], capture_output=True)
    needs(mounted.returncode == 0, f"a tmpfs cannot be mounted here: {mounted.stderr.decode().strip()}")
    known = set(base.folder.glob("runs/*/*"))
    (folder / "checkpoints").mkdir()

    def link():
        while True:
            for run_dir in set(base.folder.glob("runs/*/*")) - known:
                if (run_dir / "logs").is_dir():
                    (run_dir / "checkpoints").symlink_to(folder / "checkpoints")
                    return
            time.sleep(0.01)

    threading.Thread(target=link, daemon=True).start()
    yield SmallDisk(folder)
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def mlflow_losses(folder, run_dir):
    """The loss history in MLflow, every point of it."""
    from mlflow import MlflowClient

    client = MlflowClient(sqlite_uri(folder / "mlruns.db"))
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (run,) = [r for r in client.search_runs(experiments) if r.data.tags.get("ortlaunch.run_dir") == str(run_dir)]
    assert run.info.status == "FINISHED"
    return sorted((point.step, point.value) for point in client.get_metric_history(run.info.run_id, "train/loss"))


def test_the_steps_are_enough(base):
    assert len(base.losses) == STEPS
