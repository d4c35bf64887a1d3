"""Which worker the others wait for, and what is said of it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict

import pytest

from ortlaunch.run.run import Run
from ortlaunch.trainer.watch import Health, Watch, stuck
from tests.support.waiting import until

WAITING = """Thread 0x01 (most recent call first):
  File "/site/torch/autograd/graph.py", line 800 in _engine_run_backward
  File "/site/torch/_tensor.py", line 600 in backward
"""
BUSY = """Thread 0x01 (most recent call first):
  File "/home/me/nets.py", line 20 in forward
  File "/site/torch/nn/modules/module.py", line 1700 in _call_impl
"""


@pytest.fixture
def say(tmp_path):
    """Writes what a worker says of itself, and its stack."""
    run = Run(tmp_path)
    run.health.mkdir()
    run.stacks.mkdir()

    def write(rank, beats, time=1000.0, stack=WAITING):
        health = Health(rank, "node1", 100 + rank, beats, beats // 2, time)
        run.beat_file(rank).write_text(json.dumps(asdict(health)))
        run.stack_file(rank).write_text(stack)

    return write


def test_the_one_that_is_behind(tmp_path, say):
    say(0, 40), say(1, 39), say(2, 40)
    assert stuck(tmp_path, 3).rank == 1


def test_the_one_that_is_not_waiting_among_those_behind(tmp_path, say):
    say(0, 40), say(1, 40), say(2, 40, stack=BUSY)
    assert stuck(tmp_path, 3).rank == 2


def test_the_one_that_says_nothing_more(tmp_path, say):
    say(0, 40, stack=BUSY), say(1, 41, time=980.0), say(2, 40)
    assert stuck(tmp_path, 3).rank == 1


def test_the_one_that_never_said_anything(tmp_path, say):
    say(0, 0), say(2, 0)
    found = stuck(tmp_path, 3)
    assert (found.rank, found.host) == (1, "an unknown host")


def test_what_a_larger_attempt_left_does_not_count(tmp_path, say):
    say(0, 40), say(1, 40, stack=BUSY), say(2, 3, time=1.0)
    assert stuck(tmp_path, 2).rank == 1


STANDS_STILL = """
import sys, time
from pathlib import Path
from ortlaunch.trainer.watch import Watch

watch = Watch(Path(sys.argv[1]), 0, 1, first_seconds=60 if sys.argv[2] == "later" else 1, seconds=2)
watch.start()
if sys.argv[2] == "later":
    watch.step_done(1)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("when", "limit"),
    [("first step", "1 s (trainer.timeout_seconds)"), ("later", "2 s (launcher.timeout_seconds)")],
)
def test_the_key_that_is_named_is_the_one_that_was_waited_for(tmp_path, when, limit):
    """The first step, with export and compilation in it, has a limit of its own."""
    ran = subprocess.run([sys.executable, "-c", STANDS_STILL, str(tmp_path), when], timeout=200, check=False)
    assert ran.returncode == 1
    (failure,) = (tmp_path / "failures").iterdir()
    assert f"no progress for {limit}: rank 0 on " in json.loads(failure.read_text())["message"]


TAKES_NO_FILE = """
import sys, time
from pathlib import Path
from ortlaunch.run.run import Run
from ortlaunch.trainer import watch as module

module._PEERS_SECONDS = 0.1
watch = module.Watch(Path(sys.argv[1]), 0, 1, first_seconds=1, seconds=1)
for folder in (Run(Path(sys.argv[1])).stacks, Run(Path(sys.argv[1])).health):
    folder.rmdir()
    folder.touch()
watch.start()
time.sleep(600)
"""


def test_a_disk_that_takes_no_file_keeps_no_hanging_run_alive(tmp_path):
    """Neither stacks nor signs of life can be written, as on a full disk: the process ends all the same."""
    ran = subprocess.run([sys.executable, "-c", TAKES_NO_FILE, str(tmp_path)], timeout=200, check=False)
    assert ran.returncode == 1
    (failure,) = (tmp_path / "failures").iterdir()
    assert "no progress for 1 s" in json.loads(failure.read_text())["message"]


IS_STOPPED = """
import sys
from pathlib import Path
from ortlaunch.base import awake
from ortlaunch.trainer import watch as module

awake._STEP_SECONDS, module._PEERS_SECONDS = 0.6, 0.1
watch = module.Watch(Path(sys.argv[1]), 1, 2, first_seconds=3.3, seconds=3.3)
watch.start()
print("up", flush=True)
sys.stdin.readline()
watch.stop()
"""


@pytest.mark.parametrize("is_taken", [False, True], ids=["its launcher has the run", "another launcher has it now"])
def test_a_worker_that_was_stopped_goes_on_unless_the_run_was_taken_over(tmp_path, is_taken):
    run = Run(tmp_path)
    run.claims.mkdir()
    (run.claims / "1").touch()
    command = [sys.executable, "-c", IS_STOPPED, str(tmp_path)]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert worker.stdout.readline() == "up\n"
        worker.send_signal(signal.SIGSTOP)
        time.sleep(3.7)
        if is_taken:
            (run.claims / "2").touch()
        worker.send_signal(signal.SIGCONT)
        # Its thread looks every half second.
        until(lambda: worker.poll() is not None) if is_taken else time.sleep(0.8)
    finally:
        _, said = worker.communicate("end\n", timeout=120)
    assert worker.returncode == (1 if is_taken else 0), said
    assert ("another launcher has taken this run over" in said) == is_taken
    assert not run.failures.exists()
    assert not run.beat_file(1).exists(), "a worker that has ended gives no signs"


def test_only_a_worker_of_this_run_is_ended(tmp_path) -> None:
    """The process id comes from a file in the run folder."""
    watch = Watch(tmp_path, 0, 2, first_seconds=60, seconds=60)
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(tmp_path)])
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(tmp_path / "other")])
    try:
        # Linux may show a new process before its words.
        until(lambda: watch._is_peer(worker.pid))
        assert not watch._is_peer(other.pid)
        assert not any(watch._is_peer(pid) for pid in (0, -1, 1, 10**30))
    finally:
        for process in (worker, other):
            process.kill()
            process.wait()


def test_a_worker_that_is_started_again_for_a_lost_run_ends_before_it_writes(tmp_path, monkeypatch) -> None:
    run = Run(tmp_path)
    run.claims.mkdir()
    monkeypatch.setenv("ORTLAUNCH_CLAIM", str(run.claims / "1"))
    (run.claims / "1").touch()
    Watch(tmp_path, 0, 2, first_seconds=60, seconds=60)
    run.beat_file(0).touch()
    (run.claims / "2").touch()
    ended = []
    monkeypatch.setattr("os._exit", lambda code: ended.append(code) or sys.exit(code))
    with pytest.raises(SystemExit):
        Watch(tmp_path, 0, 2, first_seconds=60, seconds=60)
    assert ended == [1] and run.beat_file(0).exists()
