"""What runs take of the machine, by real processes, and what happens to one that takes more than it may."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from ortlaunch.run.identity import machine, start_ticks
from ortlaunch.serve.access import Role
from ortlaunch.serve.database import reading, writing
from ortlaunch.serve.dispatcher import has_process
from ortlaunch.serve.machine import Machine
from ortlaunch.serve.queue import store
from ortlaunch.serve.queue.tables import Job, JobState
from tests.serve.queue.fake_actor import FakeActor
from tests.support.service import InProcess, in_process
from tests.support.waiting import until

MIB = 1 << 20
_HOLDS = """
import os, sys, time
if os.fork():
    os.wait()
held = bytearray(int(sys.argv[1]))
print("holds", flush=True)
until = time.time() + 600
while time.time() < until:
    pass
"""
"""A process with a child that keeps memory and a core."""


@pytest.fixture
def inside(tmp_path: Path) -> InProcess:
    made = in_process(tmp_path / "runs")
    made.service.actor = made.service.queue.actor = FakeActor()
    return made


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", _HOLDS, str(150 * MIB)], stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == b"holds\n"
        yield started
        for one in [*psutil.Process(started.pid).children(), started]:
            one.kill()


def running(inside: InProcess, process: subprocess.Popen[bytes], run_dir: Path, **limits: float) -> str:
    """The job of a run that this process is."""
    checked: dict[str, Any] = {"name": "n", "experiment": "e", "launcher": "local", "steps": 3, "words": ["x"]}
    checked |= {"run_dir": str(run_dir), "slots": 1, "needs": {"cores": 1, "memory": 1, "disk": 1}}
    with writing(inside.service.engine) as session:
        request = {"job": None, "keys": {}}
        owner = inside.person("rob", Role.runner)
        allowance = store.Allowance(None, limits)
        key = "20260101-000000-abcdef"
        job = store.add_job(session, (owner.user_id, "rob"), "root", key, request, checked, allowance)
        job.state, job.started, job.taken = JobState.RUNNING, time.time(), ["cpu0"]
        job.pid, job.ticks, job.machine = process.pid, start_ticks(process.pid), machine()
        return job.id


def job_of(inside: InProcess, job_id: str) -> Job:
    with reading(inside.service.engine) as session:
        return session.get_one(Job, job_id)


def test_a_run_over_its_memory_is_stopped_with_the_reason(
    inside: InProcess, process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    queue, actor = inside.service.queue, inside.service.actor
    job_id = running(inside, process, tmp_path / "run", memory=1024 * MIB)
    looks = Machine(queue, tmp_path)
    looks.look()
    assert looks.now is not None
    [taken] = looks.now.runs
    assert (taken.owner, taken.slots, 150 * MIB < taken.memory < 400 * MIB) == ("rob", ["cpu0"], True)
    assert job_of(inside, job_id).stop_asked is None
    with writing(inside.service.engine) as session:
        session.get_one(Job, job_id).limits = {"memory": 140 * MIB}
    queue._is_open = True
    looks.look()
    queue.turn()
    job = job_of(inside, job_id)
    assert job.stop_asked is not None
    assert job.reason.startswith("it had taken ") and job.reason.endswith(", and may take 140.0 MiB of memory")
    until(lambda: actor.actions("cancel"))
    assert [request["now"] for request in actor.actions("cancel")] == [False]
    # One that goes on to take more is ended at once.
    with writing(inside.service.engine) as session:
        session.get_one(Job, job_id).limits = {"memory": 10 * MIB}
    looks.look()
    until(lambda: any(request["now"] for request in actor.actions("cancel")))
    actor.ended[job.run_dir] = {"began": True, "is_over": True, "state": "stopped", "reason": "at step 3"}
    queue._note(job, actor.ended[job.run_dir])
    over = job_of(inside, job_id)
    assert (over.outcome, over.reason) == ("stopped", f"{job.reason}; at step 3")


def test_a_run_over_its_disk_is_stopped_with_the_reason(
    inside: InProcess, process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    queue, folder = inside.service.queue, tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "large").write_bytes(b"x" * 3 * MIB)
    job_id = running(inside, process, tmp_path / "run", disk=4 * MIB)
    queue._is_open = True
    queue._measure(job_of(inside, job_id))
    assert job_of(inside, job_id).stop_asked is None
    (folder / "larger").write_bytes(b"x" * 3 * MIB)
    queue.turn()
    job = until(lambda: job if (job := job_of(inside, job_id)).stop_asked else None)
    assert job.reason == "it had taken 6.0 MiB of disk, and may take 4.0 MiB of disk"


def test_the_machine_is_shown_by_run_now_and_before(
    inside: InProcess, process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    running(inside, process, tmp_path / "run")
    looks, headers = inside.service.machine, inside.token("vera", Role.viewer)
    page = inside.client().get("/machine", headers=headers).text
    assert "looked at for the first time" in page
    looks.look()
    time.sleep(0.5)
    looks.queue.slots.use = {"gpu0": {"busy": 0.5, "memory": 0.25}}
    looks.look()
    assert has_process(job_of(inside, "q1"))
    looks.day.appendleft(replace(looks.day[0], at=time.time() - 7200))
    found = inside.client().get("/api/machine?minutes=60", headers=headers).json()
    assert (found["cores"] > 0, found["memory"] > 0, len(found["before"])) == (True, True, 1)
    [run] = found["now"]["runs"]
    assert run["cores"] > 0.2, "it keeps a core busy"
    assert all(0 <= found["now"][name] <= 1 for name in ("cores", "memory", "disk"))
    page = inside.client().get("/machine", headers=headers).text
    assert "gpu0, busy" in page and "50 %" in page and page.count("<polyline") == 5
    assert f'href="/runs/{run["id"]}"' in page
    part = inside.client().get("/machine", headers={**headers, "HX-Request": "true"}).text
    assert part.startswith('<div id="machine"')
