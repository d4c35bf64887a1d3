"""Requests to stop, between real processes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from ortlaunch.run.run import Run
from ortlaunch.trainer.stop import StopRequests
from tests.support.torchrun import leave
from tests.support.two import in_two

STEPS = 2000


def worker(rank: int, folder: str, how: str) -> None:
    """Makes steps of a millisecond until all agree to stop; leaves the number of the step."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    chosen = (signal.SIGUSR1,)
    stop = StopRequests(Path(folder), dist.group.WORLD, is_first=rank == 0, grace_seconds=60, signals=chosen)
    stop.listen()
    for step in range(1, STEPS + 1):
        time.sleep(0.001 * (1 + rank))
        if step == 50 and rank == 1 and how in ("SIGTERM", "SIGUSR1"):
            os.kill(os.getpid(), signal.Signals[how])
        if step == 50 and rank == 1 and how == "file":
            (Run(Path(folder)).stop_file).touch()
        if stop.agreed():
            break
    stop.close()
    (Path(folder) / f"rank-{rank}").write_text(str(step))
    leave()


@pytest.mark.parametrize("how", ["SIGTERM", "SIGUSR1", "file", "nothing"])
def test_all_workers_stop_at_the_same_step(tmp_path, how):
    """Asked on one of them only; without a request nobody stops."""
    in_two(worker, str(tmp_path), how)
    steps = [int((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
    assert steps[0] == steps[1]
    assert (steps[0] == STEPS) == (how == "nothing")
    assert steps[0] > 50


def lingering(folder: str, number: int | None) -> None:
    """Loses a child, as a worker whose loader processes end; then is signalled, and takes longer than it may."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    # As torch does where it has started loader processes.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    StopRequests(Path(folder), dist.group.WORLD, is_first=True, grace_seconds=0.2).listen()
    subprocess.run(["true"], check=True)
    if number is not None:
        os.kill(os.getpid(), number)
    # Long beyond its grace where nobody asks, and longer than anybody waits where somebody does.
    time.sleep(1.5 if number is None else 600)
    os._exit(0)


@pytest.mark.parametrize(("number", "code"), [(None, 0), (signal.SIGTERM, 143)], ids=["nothing", "signal"])
def test_only_a_request_to_stop_ends_a_process_that_takes_too_long(tmp_path, number, code):
    process = mp.get_context("spawn").Process(target=lingering, args=(str(tmp_path), number))
    process.start()
    try:
        process.join(200)
        assert process.exitcode == code
    finally:
        process.kill()  # It does not listen to SIGTERM.


def slowing(folder: str) -> int:
    """Makes steps of which only the first is quick, and asks at the second; returns how many it makes."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    stop = StopRequests(Path(folder), dist.group.WORLD, is_first=True, grace_seconds=60)
    for step in range(1, 30):
        if stop.agreed():
            break
        if step == 2:
            stop.ask()
        time.sleep(0.1)
    stop.close()
    dist.destroy_process_group()
    return step


def test_one_quick_step_does_not_put_off_a_request(tmp_path):
    assert slowing(str(tmp_path)) < 10


class Nobody:
    """Takes the place of the group of all workers."""


def test_a_file_system_that_errs_once_ends_no_training(tmp_path, monkeypatch):
    """NFS answers ESTALE for a file that the server has just replaced."""
    stop = StopRequests(tmp_path, Nobody(), is_first=True, grace_seconds=60)
    (Run(tmp_path).stop_file).touch()
    assert stop._is_asked
    usual = os.stat

    def stale(path, *args, **keys):
        if str(path).endswith("STOP"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return usual(path, *args, **keys)

    monkeypatch.setattr(os, "stat", stale)
    assert not stop._is_asked
    monkeypatch.undo()
    assert stop._is_asked
