"""Loader processes under signals and when their worker dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ortlaunch.base.sockets import socket_folder
from ortlaunch.config.schema import SyntheticConfig
from ortlaunch.data.loader import build_loader

WORKER = """
import multiprocessing, signal, sys
import torch
from ortlaunch.base.sockets import use_socket_folder
from ortlaunch.config.schema import SyntheticConfig
from ortlaunch.data.loader import build_loader

# torch's own look after the worker, which would do in some seconds what is tested here.
torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 1000
stop = []
use_socket_folder()
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: stop.append(1))
loader = build_loader(SyntheticConfig(workers=2), batch_size=2, rank=0, world_size=1, seed=0)
next(loader)
print(*(process.pid for process in multiprocessing.active_children()), flush=True)
while not stop:
    next(loader)
for _ in range(200):  # the step that the signal fell into still wants its data
    next(loader)
if sys.argv[1] == "close":
    loader.close()
if sys.argv[1] == "raise":
    raise KeyboardInterrupt
print("done", flush=True)
"""

PATIENCE = 200


@pytest.fixture
def workers() -> Iterator[list[subprocess.Popen[str]]]:
    """Workers started by a test; whatever is left of their process groups is killed."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for worker in started:
        with suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.communicate()


def start(workers: list[subprocess.Popen[str]], ending: str) -> tuple[subprocess.Popen[str], list[int]]:
    """Starts a worker in a process group of its own; returns it and its loader processes."""
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, ending], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    workers.append(worker)
    assert worker.stdout is not None
    children = [int(pid) for pid in worker.stdout.readline().split()]
    assert len(children) == 2
    return worker, children


def alive(pids: list[int]) -> list[int]:
    """Those that still run; a zombie does not."""
    return [pid for pid in pids if Path(f"/proc/{pid}/stat").exists() and _state(pid) not in "ZX"]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def wait_gone(pids: list[int]) -> list[int]:
    """Waits until none runs; returns those that outlast the wait."""
    deadline = time.monotonic() + PATIENCE
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive(pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_leaves_the_data_flowing(
    workers: list[subprocess.Popen[str]], number: signal.Signals
) -> None:
    worker, children = start(workers, "close")
    os.killpg(worker.pid, number)
    out, err = worker.communicate(timeout=PATIENCE)
    assert (out, worker.returncode) == ("done\n", 0), err
    assert not alive(children)


@pytest.mark.parametrize("ending", ["forget", "raise"])
def test_a_loader_that_nobody_closed_ends_at_exit(workers: list[subprocess.Popen[str]], ending: str) -> None:
    worker, children = start(workers, ending)
    os.killpg(worker.pid, signal.SIGINT)
    worker.communicate(timeout=PATIENCE)
    assert not alive(children)


def test_loader_processes_end_when_their_worker_is_killed(workers: list[subprocess.Popen[str]]) -> None:
    worker, children = start(workers, "close")
    worker.kill()
    assert not wait_gone(children)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files of its own. Its name is short: pytest's are too long for a socket in them."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        monkeypatch.setattr("tempfile.tempdir", name)
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setenv("ORTLAUNCH_SOCKETS", "")
        yield Path(name)


def test_sockets_of_loader_processes_that_are_killed_do_not_stay(
    workers: list[subprocess.Popen[str]], temporary: Path
) -> None:
    with socket_folder():
        worker, children = start(workers, "close")
        (folder,) = temporary.iterdir()
        assert any(path.is_socket() for path in folder.iterdir())
        worker.kill()
        for child in children:
            os.kill(child, signal.SIGKILL)
        assert not wait_gone(children)
    assert list(temporary.iterdir()) == []


def test_loader_processes_hand_over_batches_where_the_temporary_folder_has_a_long_name(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = temporary / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with build_loader(SyntheticConfig(workers=1), batch_size=2, rank=0, world_size=1, seed=0) as loader:
        loader.start_processes()
        folder = Path(os.environ["ORTLAUNCH_SOCKETS"])
        # The kernel takes 107 bytes. A batch that cannot be handed over is waited for without end.
        assert folder.name and len(str(folder / "listener-12345678")) <= 107
        next(loader)
    assert not folder.exists() and "ORTLAUNCH_SOCKETS" not in os.environ
    assert list(long.iterdir()) == []


def test_no_room_in_shared_memory_is_said_in_a_sentence(temporary: Path) -> None:
    code = """
        import resource
        from ortlaunch.base.errors import TrainingError
        from ortlaunch.config.schema import SyntheticConfig
        from ortlaunch.data.loader import build_loader
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # For files in shared memory, too.
        try:
            next(build_loader(SyntheticConfig(workers=1), batch_size=64, rank=0, world_size=1, seed=0))
        except TrainingError as error:
            print(error)
    """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.stdout.startswith("/dev/shm, through which loader processes hand over batches, has no room"), (
        done.stderr
    )
