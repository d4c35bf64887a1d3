"""The dispatcher: from the decision to the end of a job, with what may go wrong on the way."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from ortlaunch.run import events
from ortlaunch.run.identity import machine, start_ticks
from ortlaunch.run.run import Run
from ortlaunch.serve.actor import Refused
from ortlaunch.serve.database import open_database, reading, writing
from ortlaunch.serve.dispatcher import Queue, _is_too_long
from ortlaunch.serve.queue import store
from ortlaunch.serve.queue.slots import Slots
from ortlaunch.serve.queue.tables import Job, JobState
from ortlaunch.serve.tables import User
from ortlaunch.serve.unfit import Unavailable
from tests.serve.queue.fake_actor import GONE, FakeActor
from tests.support import waiting

_USED = ("ann", "bob")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    opened = open_database(tmp_path / ".serve" / "serve.db")
    with writing(opened) as session:
        for name in _USED:
            session.add(User(name=name, role="runner", unix_user="root", password=None, created=0.0))
    yield opened
    opened.dispose()


@pytest.fixture
def actor() -> FakeActor:
    return FakeActor()


@pytest.fixture
def queue(engine: Engine, actor: FakeActor) -> Iterator[Queue]:
    made = Queue(engine, actor, Slots(2), Path("/nowhere"))  # type: ignore[arg-type]
    made.start()
    yield made
    made.stop()


def add(engine: Engine, number: int = 1, owner: str = "ann", slots: int = 1, **changes: Any) -> str:
    """Puts a job into the queue."""
    shown = {"name": "n", "experiment": "e", "launcher": "local", "steps": 3, "words": ["x"]}
    checked = {**shown, "run_dir": f"/nowhere/e/run{number}", "slots": slots, "needs": {}, **changes.pop("checked", {})}
    request = {"job": None, "keys": {}, "minutes": changes.pop("minutes", None)}
    with writing(engine) as session:
        key = f"20260101-000000-{number:06x}"
        job = store.add_job(session, (1 + _USED.index(owner), owner), "root", key, request, checked)
        for name, value in changes.items():
            setattr(job, name, value)
        return job.id


def job_of(engine: Engine, job_id: str) -> Job:
    with reading(engine) as session:
        return session.get_one(Job, job_id)


def until(engine: Engine, job_id: str, holds: Callable[[Job], bool]) -> Job:
    """Waits until something holds for a job."""

    def found() -> Job | None:
        return job if holds(job := job_of(engine, job_id)) else None

    return waiting.until(found, said=lambda: vars(job_of(engine, job_id)))


def ends(state: str = "finished") -> dict[str, Any]:
    return {"began": True, "is_over": True, "state": state, "reason": "at step 3" if state == "stopped" else ""}


def test_a_job_runs_from_the_queue_to_its_end(engine: Engine, actor: FakeActor, queue: Queue) -> None:
    job_id = add(engine)
    queue.wake()
    running = until(engine, job_id, lambda job: job.state == JobState.RUNNING)
    assert (running.taken, running.attempts, running.reason) == (["cpu0"], 1, "")
    assert running.pid is not None
    actor.ended["/nowhere/e/run1"] = ends("stopped")
    with writing(engine) as session:
        session.get_one(Job, job_id).pid = GONE["pid"]
    over = until(engine, job_id, lambda job: job.state == JobState.ENDED)
    assert (over.outcome, over.reason, over.taken) == ("stopped", "at step 3", [])
    with reading(engine) as session:
        assert store.shares(session, time.time())["ann"] > 0


def test_a_number_that_another_process_has_now_does_not_count(engine: Engine, actor: FakeActor, queue: Queue) -> None:
    job_id = add(engine)
    queue.wake()
    until(engine, job_id, lambda job: job.state == JobState.RUNNING)
    actor.ended["/nowhere/e/run1"] = ends()
    with writing(engine) as session:
        session.get_one(Job, job_id).ticks = 1
    until(engine, job_id, lambda job: job.outcome == "finished")


def test_a_start_without_an_answer_is_asked_for_again_and_means_the_same_start(
    engine: Engine, actor: FakeActor
) -> None:
    actor.silent = 1000
    job_id = add(engine)
    first = Queue(engine, actor, Slots(2), Path("/nowhere"))  # type: ignore[arg-type]
    first.start()
    until(engine, job_id, lambda job: job.state == JobState.STARTING and actor.begun.total() > 0)
    first.stop()
    actor.silent = 0
    # Another service, as after a kill: it finds the intent.
    second = Queue(engine, actor, Slots(2), Path("/nowhere"))  # type: ignore[arg-type]
    second.start()
    job = until(engine, job_id, lambda job: job.state == JobState.RUNNING)
    second.stop()
    assert set(actor.begun) == {(job.token, 1)} and actor.begun.total() > 1


def test_a_start_that_is_tried_again_says_why(engine: Engine, actor: FakeActor, queue: Queue) -> None:
    actor.silent = 1000
    job_id = add(engine)
    queue.wake()
    job = until(engine, job_id, lambda job: bool(job.reason))
    assert (job.state, job.reason) == (JobState.STARTING, "not started yet, and tried again: start: no answer")
    actor.silent = 0
    queue._again.clear()
    queue.wake()
    assert until(engine, job_id, lambda job: job.state == JobState.RUNNING).reason == ""


def test_a_refusal_at_the_start_is_kept_with_its_message(engine: Engine, actor: FakeActor, queue: Queue) -> None:
    actor.start_refuses = "the disk is full"
    job_id = add(engine)
    queue.wake()
    over = until(engine, job_id, lambda job: job.state == JobState.REFUSED)
    assert (over.reason, over.taken) == ("the disk is full", [])


def test_a_job_that_is_stopped_while_it_starts_never_begins(engine: Engine, actor: FakeActor) -> None:
    asked = {"state": JobState.STARTING, "attempts": 1, "stop_asked": 1.0, "taken": ["cpu0"]}
    by_somebody, locked_out = (add(engine, number, **asked, reason=why) for number, why in ((1, ""), (2, "locked out")))
    queue = Queue(engine, actor, Slots(2), Path("/nowhere"))  # type: ignore[arg-type]
    for job_id in (by_somebody, locked_out):
        queue._start(job_id)
    assert not actor.begun
    over = [job_of(engine, job_id) for job_id in (by_somebody, locked_out)]
    assert [(job.state, job.reason, job.taken) for job in over] == [
        (JobState.CANCELLED, "stopped before it began", []),
        (JobState.CANCELLED, "locked out", []),
    ]


def test_a_job_that_has_begun_when_it_is_stopped_is_asked_to_stop(engine: Engine, actor: FakeActor) -> None:
    job_id = add(engine, state=JobState.STARTING, attempts=1, taken=["cpu0"])
    actor.silent = 1
    queue = Queue(engine, actor, Slots(2), Path("/nowhere"))  # type: ignore[arg-type]
    with pytest.raises(Unavailable):
        queue._start(job_id)
    with writing(engine) as session:
        session.get_one(Job, job_id).stop_asked = 1.0
    queue.start()
    until(engine, job_id, lambda job: job.state == JobState.RUNNING)
    waiting.until(lambda: actor.actions("cancel"))
    queue.stop()


def test_a_command_that_ends_before_its_run_begins_says_why(engine: Engine, actor: FakeActor, queue: Queue) -> None:
    actor.lives = False
    actor.ended["/nowhere/e/run1"] = {"refusal": "device=cuda and this machine shows no GPU"}
    job_id = add(engine)
    queue.wake()
    over = until(engine, job_id, lambda job: job.state == JobState.REFUSED)
    assert over.reason == "device=cuda and this machine shows no GPU"


@pytest.mark.nightly
def test_a_start_that_the_machine_has_cut_off_is_made_again_three_times_at_most(
    engine: Engine, actor: FakeActor, queue: Queue
) -> None:
    actor.lives = False
    job_id = add(engine)
    queue.wake()
    over = until(engine, job_id, lambda job: job.state == JobState.REFUSED)
    assert over.reason == "its process was ended from outside before the run began"
    assert actor.begun == {(over.token, 1): 1, (over.token, 2): 1, (over.token, 3): 1}


def test_a_continuation_is_not_made_again(engine: Engine, actor: FakeActor, queue: Queue) -> None:
    actor.lives = False
    job_id = add(engine, resumes=True)
    queue.wake()
    over = until(engine, job_id, lambda job: job.state == JobState.REFUSED)
    assert actor.begun == {(over.token, 1): 1}


def test_a_run_beyond_its_time_is_asked_to_stop(engine: Engine, actor: FakeActor, queue: Queue) -> None:
    job_id = add(engine, minutes=0.001)
    queue.wake()
    until(engine, job_id, lambda job: job.state == JobState.RUNNING)
    waiting.until(lambda: actor.actions("cancel"))
    [asked] = actor.actions("cancel")
    assert (asked["run_dir"], asked["begun_before"]) == ("/nowhere/e/run1", 0)


def test_only_a_run_on_slots_has_a_time_limit_here(engine: Engine) -> None:
    long_ago = {"minutes": 1.0, "started": time.time() - 3600}
    assert _is_too_long(job_of(engine, add(engine, 1, **long_ago)))
    assert not _is_too_long(job_of(engine, add(engine, 2, slots=0, **long_ago)))


def test_a_clock_that_is_set_stops_no_run_and_charges_nobody(engine: Engine) -> None:
    """As on a machine that had a wrong clock when it was started."""
    process = {"pid": os.getpid(), "ticks": start_ticks(os.getpid()), "machine": machine()}
    began_long_ago = {"minutes": 600.0, "started": time.time() - 1e6, "taken": ["slot 1"], **process}
    job_id = add(engine, state=JobState.RUNNING, **began_long_ago)
    assert not _is_too_long(job_of(engine, job_id))
    with writing(engine) as session:
        store.note_end(session, session.get_one(Job, job_id), JobState.ENDED)
        assert store.shares(session, time.time())["ann"] < 36_000


def test_two_slots_take_two_jobs_and_the_third_says_why_it_waits(
    engine: Engine, actor: FakeActor, queue: Queue
) -> None:
    jobs = [add(engine, number, owner) for number, owner in enumerate(("ann", "ann", "bob"), start=1)]
    queue.wake()
    until(engine, jobs[0], lambda job: job.state == JobState.RUNNING)
    until(engine, jobs[2], lambda job: job.state == JobState.RUNNING)
    last = until(engine, jobs[1], lambda job: bool(job.reason))
    assert (last.state, last.reason) == (JobState.WAITING, "next: it needs 1 slot, 0 free")
    assert queue.positions() == {jobs[1]: 1}
    with reading(engine) as session:
        held = [name for job in store.in_states(session, JobState.RUNNING) for name in job.taken]
    assert sorted(held) == ["cpu0", "cpu1"]


def test_a_paused_queue_starts_nothing_and_a_drained_slot_takes_none(
    engine: Engine, actor: FakeActor, queue: Queue
) -> None:
    with writing(engine) as session:
        store.set_paused(session, paused=True)
        store.set_drained(session, ["cpu0"])
    job_id = add(engine)
    queue.wake()
    until(engine, job_id, lambda job: job.reason == "the queue is paused by an administrator")
    with writing(engine) as session:
        store.set_paused(session, paused=False)
    queue.wake()
    assert until(engine, job_id, lambda job: job.state == JobState.RUNNING).taken == ["cpu1"]


def test_a_job_of_a_scheduler_says_that_the_queue_is_paused(engine: Engine, actor: FakeActor, queue: Queue) -> None:
    with writing(engine) as session:
        store.set_paused(session, paused=True)
    job_id = add(engine, slots=0)
    queue.wake()
    job = until(engine, job_id, lambda job: bool(job.reason))
    assert (job.state, job.reason) == (JobState.WAITING, "the queue is paused by an administrator")
    with writing(engine) as session:
        store.set_paused(session, paused=False)
    queue.wake()
    assert until(engine, job_id, lambda job: job.state == JobState.RUNNING).reason == ""


def test_a_job_of_a_scheduler_is_handed_over_at_once(engine: Engine, actor: FakeActor, queue: Queue) -> None:
    jobs = [add(engine, number, slots=0, checked={"launcher": "slurm"}) for number in (1, 2, 3)]
    queue.wake()
    for job_id in jobs:
        assert until(engine, job_id, lambda job: job.state == JobState.RUNNING).taken == []


def test_a_job_that_a_scheduler_has_is_not_handed_over_again(engine: Engine, actor: FakeActor, queue: Queue) -> None:
    job_id = add(engine, slots=0, checked={"launcher": "slurm"}, state=JobState.RUNNING, attempts=1)
    queue.wake()
    waiting.until(lambda: actor.actions("outcome"))
    time.sleep(0.2)
    assert job_of(engine, job_id).state == JobState.RUNNING
    assert actor.begun == {}


def test_a_run_that_cannot_be_read_ends_when_a_stop_was_asked(engine: Engine, actor: FakeActor, queue: Queue) -> None:
    unreadable = {"began": True, "is_over": False, "state": "unknown"}
    actor.ended = {"/nowhere/e/run1": unreadable, "/nowhere/e/run2": unreadable}
    gone = {"state": JobState.RUNNING, "attempts": 1, "pid": GONE["pid"], "ticks": 1}
    kept, stopped = add(engine, 1, **gone), add(engine, 2, stop_asked=1.0, **gone)
    queue.wake()
    over = until(engine, stopped, lambda job: job.state == JobState.ENDED)
    assert (over.outcome, over.reason) == ("killed", "its run folder cannot be read")
    assert job_of(engine, kept).state == JobState.RUNNING


def test_what_has_ended_of_a_user_whom_the_service_may_not_act_for_any_more_holds_no_slots(
    engine: Engine, actor: FakeActor, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_request: dict[str, Any]) -> dict[str, Any]:
        raise Refused("the service may not act for this user")

    monkeypatch.setattr(actor, "_outcome", refuse)
    begun = {"state": JobState.RUNNING, "attempts": 1}
    ended = add(engine, 1, taken=["cpu0"], pid=GONE["pid"], ticks=1, **begun)
    of_scheduler = add(engine, 2, slots=0, **begun)
    queue.wake()
    over = until(engine, ended, lambda job: job.state == JobState.ENDED)
    assert (over.outcome, over.reason, over.taken) == ("killed", "the service may not act for this user", [])
    assert job_of(engine, of_scheduler).state == JobState.RUNNING


def test_many_runs_are_looked_at_in_several_requests(engine: Engine, actor: FakeActor) -> None:
    gone = {"state": JobState.RUNNING, "attempts": 1, "pid": GONE["pid"], "ticks": 1}
    jobs = [add(engine, number, **gone) for number in range(1, 121)]
    actor.ended = {f"/nowhere/e/run{number}": ends() for number in range(1, 121)}
    queue = Queue(engine, actor, Slots(2), Path("/nowhere"))  # type: ignore[arg-type]
    queue._ask("root", [job_of(engine, job_id) for job_id in jobs])
    assert [len(request["jobs"]) for request in actor.actions("outcome")] == [50, 50, 20]
    assert {job_of(engine, job_id).outcome for job_id in jobs} == {"finished"}


def test_a_late_answer_to_a_start_brings_no_job_back(
    engine: Engine, actor: FakeActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = add(engine, state=JobState.STARTING, attempts=1)
    queue = Queue(engine, actor, Slots(2), Path("/nowhere"))  # type: ignore[arg-type]

    def call(*_: Any) -> dict[str, Any]:
        queue._end(job_id, JobState.ENDED, outcome="finished")
        return {"process": GONE}

    monkeypatch.setattr(actor, "call", call)
    queue._start(job_id)
    assert (job_of(engine, job_id).state, job_of(engine, job_id).pid) == (JobState.ENDED, None)


def test_a_gpu_that_somebody_else_uses_is_withheld(
    engine: Engine, actor: FakeActor, tmp_path: Path, monkeypatch
) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\ncase $1 in *compute-apps*) echo GPU-b, 4242;; *uuid*) echo 0, GPU-a; echo 1, GPU-b;; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    queue = Queue(engine, actor, Slots(), Path("/nowhere"))  # type: ignore[arg-type]
    queue.start()
    first, second = add(engine, 1), add(engine, 2)
    queue.wake()
    assert until(engine, first, lambda job: job.state == JobState.RUNNING).taken == ["gpu0"]
    assert until(engine, second, lambda job: bool(job.reason)).state == JobState.WAITING
    queue.stop()
    assert set(queue.slots.withheld()) == {"gpu1"}
    assert actor.actions("start")[0]["gpus"] == [0]


class SlowActor(FakeActor):
    """An actor whose children for the Unix user ``slow`` give no answer, and no stop gets one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def call(self, unix_user: str, action: str, request: Mapping[str, Any]) -> dict[str, Any]:
        if unix_user == "slow" or action == "cancel":
            assert self.gate.wait(120)
        return super().call(unix_user, action, request)


def test_a_unix_user_whose_home_hangs_and_stops_that_take_long_keep_no_run_waiting(engine: Engine) -> None:
    actor = SlowActor()
    queue = Queue(engine, actor, Slots(1), Path("/nowhere"))  # type: ignore[arg-type]
    for number in range(1, 9):
        add(engine, number, checked={"slots": 0}, unix_user="slow")
    for number in range(11, 19):
        changes = {"state": JobState.RUNNING, "stop_asked": 1.0, "pid": os.getpid(), "ticks": start_ticks(os.getpid())}
        add(engine, number, checked={"slots": 0}, **changes)
    last = add(engine, 20, "bob")
    queue.start()
    try:
        until(engine, last, lambda job: job.state == JobState.RUNNING)
        at_work = [one for one in threading.enumerate() if one.name.startswith("queue-act")]
        assert at_work and all(one.daemon for one in at_work), "Ctrl-C would wait for the children of these threads"
    finally:
        actor.gate.set()
        queue.stop()


def test_a_run_that_is_ending_is_waited_for(
    engine: Engine, actor: FakeActor, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = add(engine)
    queue.decide()
    until(engine, job_id, lambda job: job.state == JobState.RUNNING)
    still = queue.settle(job_id, 0.2)
    assert still is not None, "a run that goes on is not waited for"
    assert still.state == JobState.RUNNING
    actor.ended["/nowhere/e/run1"] = ends()
    with writing(engine) as session:
        session.get_one(Job, job_id).pid = GONE["pid"]
    assert queue.settle(job_id, 120.0) is None
    assert job_of(engine, job_id).outcome == "finished"


def test_who_waits_for_an_end_reads_each_line_once(
    engine: Engine, queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with Run(run).journal() as journal:
        journal.start("e", "n", "1a2b3c")
        journal.end("FINISHED")
    # Its process lives: it still sends the record.
    own = {"pid": os.getpid(), "ticks": start_ticks(os.getpid()), "machine": machine()}
    job_id = add(engine, checked={"run_dir": str(run)}, state=JobState.RUNNING, **own)
    lines: list[bytes] = []
    decode = events.decode
    monkeypatch.setattr(events, "decode", lambda line: lines.append(line) or decode(line))
    looks: list[None] = []

    def looked() -> None:
        looks.append(None)
        # The service ends, which nobody waits for.
        queue._is_open = len(looks) < 3

    monkeypatch.setattr(queue, "wake", looked)
    assert queue.settle(job_id, 600.0) is not None
    assert (len(looks), len(lines)) == (3, 2)
