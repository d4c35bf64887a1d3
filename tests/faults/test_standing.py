"""What a run survives: processes that stand still, a second owner, lack of memory, a clock that is set back."""

from __future__ import annotations

import itertools
import re
import signal
import struct
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.faults.trials import STEPS
from tests.integration.conftest import RUN_SECONDS, Started, journal, mentioning
from tests.support.control_groups import Group
from tests.support.needs import needs

STANDING = "ortlaunch.standing_still"


@pytest.fixture
def group(request):
    """A control group with the controller that the test names."""
    try:
        made = Group(request.param)
    except OSError as error:
        needs(False, f"no control group can be made here: {error}")
    yield made
    made.close()


def said_standing(run):
    """What the journal says of workers that stand still, in order."""
    return [event["values"][STANDING] for event in journal(run.run_dir) if STANDING in event.get("values", {})]


def told(run, rank, worker, why):
    """Waits until the journal tells of a worker; `status` says the same."""
    run.wait_for(lambda: said_standing(run))
    (text,) = said_standing(run)
    assert text.startswith(f"rank {rank} on ") and f"(process {worker.pid})" in text and why in text
    status = Started(run.base.folder, ("status", str(run.run_dir))).finish()
    assert re.search(rf"^stands still: +{re.escape(text)}$", status.stdout, re.MULTILINE), status.report


def goes_on(run, rank):
    """The run ends well, and its output has told of the worker."""
    result = run.running.finish()
    assert result.returncode == 0, result.report
    run.check_same()
    assert re.search(rf"rank {rank} on .* no sign of life since .*\. The other workers wait for it", result.stdout)
    assert f"rank {rank} goes on at" in result.stdout, result.report
    assert said_standing(run)[-1] == "none"


def test_stop_of_a_worker(start, trial):
    """SIGSTOP for longer than a worker may make no progress, of which its own clock has seen nothing."""
    run = start(trial)
    run.reach_some_step(left=STEPS // 2)
    rank = run.random.randrange(2)
    worker = run.workers()[rank]
    worker.suspend()
    told(run, rank, worker, "SIGSTOP")
    worker.resume()
    goes_on(run, rank)


@pytest.mark.nightly  # A control group needs root, and a kernel that lets this machine make one.
@pytest.mark.parametrize("group", ["freezer"], indirect=True)
def test_pause_of_a_container(start, trial, group):
    run = start(trial)
    run.reach_some_step(left=STEPS // 2)
    rank = run.random.randrange(2)
    worker = run.workers()[rank]
    group.take(worker)
    group.freeze(on=True)
    try:
        told(run, rank, worker, "frozen")
    finally:
        group.freeze(on=False)
    goes_on(run, rank)


@pytest.mark.nightly
def test_stop_of_every_process(start, trial):
    """As by ``scontrol suspend``, longer than steps and collectives may take. CI has the parts in test_stalls.py."""
    run = start(trial, "launcher.timeout_seconds=6", "trainer.timeout_seconds=10")
    run.reach_some_step(left=STEPS // 2)
    processes = [psutil.Process(run.running.process.pid), *mentioning(run.run_dir)]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.suspend()
    time.sleep(12)
    run.random.shuffle(processes)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.resume()
    result = run.running.finish()
    assert result.returncode == 0, result.report
    assert re.search(r"this command could not run for \d+ s, until", result.stdout), result.report
    run.check_same()
    assert said_standing(run) == []


@pytest.mark.nightly
def test_resumes_at_once(start, trial):
    """Two, and sometimes twenty: one has the run, the others are refused in a line. CI has it in test_claim.py."""
    run = start(trial)
    run.reach_some_step()
    run.kill_all()
    before = run.complete()
    words = ("resume", str(run.run_dir))
    begun = [Started(run.base.folder, words) for _ in range(20 if trial % 5 == 4 else 2)]
    results = [one.finish() for one in begun]
    assert sorted(result.returncode for result in results) == [0] + [2] * (len(results) - 1), results[0].report
    refusal = r"ortlaunch: .+ (is still running \(process \d+\): stop it first|is being launched by another process at"
    refusal += r" this moment|was launched by another process meanwhile: ortlaunch status .+)\n"
    for result in results:
        if result.returncode == 0 and before:
            assert f"going on from {run.run_dir / 'checkpoints' / before[0]}" in result.stdout, result.report
        elif result.returncode:
            assert re.fullmatch(refusal, result.stderr) and result.stdout == "", result.report
    run.check_same()
    attempts = [event for event in journal(run.run_dir) if event["event"] == "start"]
    assert len(attempts) == 2, "the first one, and the one that went on"


@pytest.mark.nightly  # As above.
@pytest.mark.parametrize("group", ["memory"], indirect=True)
def test_kill_for_lack_of_memory(start, trial, group):
    """By the kernel, in a control group whose limit is reached."""
    run = start(trial)
    run.reach_some_step(left=STEPS // 2)
    group.limit_memory(run.random.randrange(1, 9) << 20)
    rank = run.random.randrange(2)
    group.take(run.workers()[rank])
    result = run.running.finish()
    assert group.kills() == 1, result.report
    assert result.returncode == 1, result.report
    assert f"rank {rank} on " in result.stderr and "SIGKILL (out of memory?)" in result.stderr, result.report
    run.check_gone()
    run.resume()


@pytest.fixture(scope="session")
def clock_library(tmp_path_factory) -> Path:
    """Moves the wall clock of what it is preloaded into."""
    source = Path(__file__).parents[1] / "support" / "set_clock.c"
    library = tmp_path_factory.mktemp("clock") / "set_clock.so"
    built = subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source], capture_output=True, text=True)
    needs(built.returncode == 0, f"the library that moves the clock cannot be built: {built.stderr}")
    return library


@pytest.mark.nightly
def test_clock_set_back(start, trial, clock_library, tmp_path, monkeypatch):
    """By minutes or by days while it trains; then it is killed, and goes on with the clock as it is.

    CI has the parts: leases in test_claim.py, heartbeats in test_liveness.py.
    """
    offset = tmp_path / "offset"
    offset.write_bytes(struct.pack("d", 0.0))
    monkeypatch.setenv("LD_PRELOAD", str(clock_library))
    monkeypatch.setenv("SET_CLOCK", str(offset))
    run = start(trial)
    run.reach_some_step(left=STEPS // 2)
    back = run.random.choice([120.0, 3600.0, 86400.0 * 30])
    with offset.open("r+b") as file:
        file.write(struct.pack("d", -back))
    if run.random.random() < 0.5:
        run.reach(STEPS - 10)
        run.running.process.send_signal(signal.SIGKILL)
        run.running.process.wait()
        run.check_gone()
        result = run.resume()
    else:
        result = run.running.finish()
        assert result.returncode == 0, result.report
        run.check_same()
    times = [event["t"] for event in journal(run.run_dir)]
    assert min(later - earlier for earlier, later in itertools.pairwise(times)) < -1000 * (back - 60)
    assert 0 < float(re.search(r"^finished after (\S+) s", result.stdout, re.MULTILINE)[1]) < RUN_SECONDS
    figures = {name: value for event in journal(run.run_dir) for name, value in event.get("values", {}).items()}
    assert 0 < figures["goodput/wall_seconds"] < 2 * RUN_SECONDS and 0 < figures["summary/goodput_percent"] <= 100
