"""The account of a run's wall time against journals written by hand."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.run.events import Event, decode
from ortlaunch.run.goodput import goodput, journal_goodput
from ortlaunch.tracking.journal import Journal, read_events


def at(seconds: float, event: str, **fields: Any) -> Event:
    line = json.dumps({"event": event, "t": int(1000 * (1_000_000 + seconds)), **fields})
    found = decode(line.encode())
    assert found is not None
    return found


def metrics(seconds: float, step: int, **values: float) -> Event:
    return at(seconds, "metrics", step=step, values={name.replace("__", "/"): value for name, value in values.items()})


def step(seconds: float, number: int, each: float) -> Event:
    return metrics(seconds, number, train__loss=1.0, throughput__step_seconds=each)


def first(seconds: float, to_first_step: float) -> Event:
    return metrics(seconds, 0, startup__time_to_first_step_seconds=to_first_step)


START = at(0, "start", experiment="e", name="n", run_id="r")
# Starts for 20 s, of which the first step takes 6 and usually 2; then 2 steps of 4 s (warm-up), 7 of 2 s.
ATTEMPT = [START, first(20, 20), step(20, 1, 6.0), step(28, 3, 4.0), step(42, 10, 2.0)]


def tags(seconds: float, **values: str) -> Event:
    return at(seconds, "tags", values={f"ortlaunch.{name}": value for name, value in values.items()})


def test_one_attempt() -> None:
    events = [
        *ATTEMPT,
        metrics(45, 10, eval__loss=1.0, eval__seconds=3.0),
        metrics(46, 10, checkpoint__stall_seconds=1.0),
        step(66, 20, 2.0),
        at(70, "end", status="FINISHED"),
    ]
    found = goodput(events)
    assert found.wall == pytest.approx(70)
    assert found.productive == pytest.approx(20 * 2)
    # 20 s to the first step, 2 of them its own; 2 x 2 s more than usual in the second window.
    assert found.startup == pytest.approx(18 + 4)
    assert found.evaluation == pytest.approx(3)
    assert found.checkpoint == pytest.approx(1)
    assert (found.lost, found.down) == (0, 0)
    assert found.other == pytest.approx(4)
    assert found.percent == pytest.approx(100 * 40 / 70)


def test_a_worker_dies_and_the_steps_after_the_checkpoint_are_taken_again() -> None:
    """Died at 50 s with step 10 journalled; goes on after step 5, and says so at 75 s; the new worker began at 60 s."""
    events = [
        *ATTEMPT,
        at(75, "rewind", step=5, reason="goes on"),
        first(80, 20),
        step(80, 6, 5.0),
        step(88, 10, 2.0),
        at(90, "end", status="FINISHED"),
    ]
    found = goodput(events)
    # Steps 1 to 10 once, at 2 s each; 6 to 10 of the first attempt are lost.
    assert found.productive == pytest.approx(20)
    assert found.lost == pytest.approx(10)
    assert found.down == pytest.approx(60 - 42)
    assert found.startup == pytest.approx(22 + 18)
    assert found.wall == pytest.approx(90)
    assert found.other == pytest.approx(2)


def test_steps_that_were_not_journalled_but_kept_count() -> None:
    """The checkpoint held step 13, the journal step 10."""
    events = [
        *ATTEMPT,
        at(75, "rewind", step=13, reason="goes on"),
        first(80, 20),
        step(80, 14, 2.0),
        at(80, "end", status="FINISHED"),
    ]
    found = goodput(events)
    assert found.productive == pytest.approx(14 * 2)
    assert found.lost == 0


def test_time_in_the_queue_is_no_wall_time() -> None:
    def later(event: Event, seconds: float) -> Event:
        return dataclasses.replace(event, t=event.t + int(1000 * seconds))

    events = [
        START,
        tags(1, state="queued"),
        tags(1001, state="running"),
        *(later(event, 1001) for event in ATTEMPT[1:]),
        at(1043, "requeue", reason="warned", attempts=1),
        tags(1043, state="queued"),
        tags(5043, state="running"),
        at(5053, "rewind", step=10, reason="goes on"),
        first(5063, 20),
        step(5063, 11, 2.0),
        at(5063, "end", status="FINISHED"),
    ]
    found = goodput(events)
    assert found.wall == pytest.approx(5063 - 1000 - 4000)
    assert found.productive == pytest.approx(22)
    assert found.down == pytest.approx(0)
    # The second in which the job was submitted counts.
    assert found.other == pytest.approx(1 + 1043 - 1043)


@pytest.mark.parametrize(("status", "down"), [("FAILED", 1000.0), ("KILLED", 0.0)])
def test_a_failure_is_down_time_until_the_run_goes_on_and_a_stop_is_not(status: str, down: float) -> None:
    events = [
        *ATTEMPT,
        tags(42, stopped_at_step="12"),
        at(42, "end", status=status),
        at(1042, "start", experiment="e", name="n", run_id="r"),
        at(1050, "rewind", step=12, reason="goes on"),
        first(1062, 20),
        step(1062, 13, 2.0),
        at(1062, "end", status="FINISHED"),
    ]
    found = goodput(events)
    assert found.down == pytest.approx(down)
    assert found.wall == pytest.approx(62 + down)
    # Steps 11 and 12 were not journalled; the stop's checkpoint held them.
    assert found.productive == pytest.approx(26)


def test_a_run_that_takes_no_step_has_no_account(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.start("e", "n", "r")
    assert journal_goodput(journal) is None
    assert len(read_events(journal.path, 0)[0]) == 1


def test_the_account_is_journalled_at_the_last_step_and_is_no_work_itself(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.start("e", "n", "r")
    journal.metrics(0, {"startup/time_to_first_step_seconds": 0.0})
    journal.metrics(1, {"throughput/step_seconds": 0.01})
    time.sleep(0.05)
    found = journal_goodput(journal)
    events, _ = read_events(journal.path, 0)
    assert found is not None
    assert events[-1]["step"] == 1
    values = events[-1]["values"]
    assert values["summary/goodput_percent"] == found.percent > 0
    parts = [values[f"goodput/{name}_seconds"] for name in ("productive", "startup", "evaluation", "checkpoint")]
    parts += [values[f"goodput/{name}_seconds"] for name in ("lost", "down", "other")]
    assert sum(parts) == pytest.approx(values["goodput/wall_seconds"], abs=0.02)


def test_the_account_after_a_rewind_is_at_the_furthest_step(tmp_path: Path) -> None:
    """MLflow shows the value of the largest step, which would be that of the first end."""
    journal = Journal(tmp_path / "journal.jsonl")
    for rewound, reached in ((0, 10), (5, 8)):
        journal.start("e", "n", "r")
        journal.rewind(rewound, "goes on")
        journal.metrics(rewound, {"startup/time_to_first_step_seconds": 0.0})
        journal.metrics(reached, {"throughput/step_seconds": 0.01})
        assert journal_goodput(journal) is not None
        journal.end("FAILED")
    accounts = [one for one in read_events(journal.path, 0)[0] if "summary/goodput_percent" in one.get("values", {})]
    assert [one["step"] for one in accounts] == [10, 10]


def test_the_account_of_an_end_is_no_work_of_the_next_attempt() -> None:
    """Down begins with the last step, not with the account that the launcher has journalled since."""
    events = [
        *ATTEMPT,
        metrics(50, 10, summary__goodput_percent=30.0, goodput__wall_seconds=50.0),
        at(50, "end", status="FAILED"),
        at(60, "start", experiment="e", name="n", run_id="r"),
        at(70, "rewind", step=10, reason="goes on"),
        first(80, 20),
        step(80, 11, 2.0),
        at(80, "end", status="FINISHED"),
    ]
    assert goodput(events).down == pytest.approx(60 - 42)


def test_a_clock_that_was_set_back_stops_no_account() -> None:
    """The time goes on counting at once, not when the clock has reached its former time again."""
    account = goodput([START, *(metrics(seconds, 1) for seconds in (10, 20, 20 - 3600, 30 - 3600, 40 - 3600))])
    assert account.wall == 40.0
