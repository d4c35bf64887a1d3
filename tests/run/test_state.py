"""What a run's events amount to."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ortlaunch.run import events
from ortlaunch.run.events import Event, decode, encode
from ortlaunch.run.journal import iterate
from ortlaunch.run.run import Run
from ortlaunch.run.state import FIRST_STEP, STATE_TAG, RunState, fold

START = events.Started(1000, "e", "n", "abc123")


def drawn(draw: random.Random) -> Event:
    """An event of any kind with any values."""
    t, step = draw.randrange(2**41), draw.randrange(2**40)
    text = "".join(chr(draw.choice((draw.randrange(32, 127), draw.randrange(0x80, 0xD800)))) for _ in range(12))
    values = {text[:4]: draw.uniform(-1e9, 1e9), "inf": float("inf"), "-inf": float("-inf")}
    return draw.choice(
        [
            events.Started(t, text, text, text),
            events.ParamsSet(t, {text: text}),
            events.Tagged(t, {text: text}),
            events.Measured(t, step, values),
            events.Rewound(t, step, text),
            events.Requeued(t, text, step),
            events.FileKept(t, text, text),
            events.DatasetUsed(t, text, text, text),
            events.WorkerFailed(t, 3, text, text),
            events.Ended(t, draw.choice(["FINISHED", "FAILED", "KILLED"])),
        ]
    )


@pytest.mark.parametrize("seed", range(200))
def test_an_event_comes_back_as_it_was(seed: int) -> None:
    event = drawn(random.Random(seed))
    line = encode(event)
    assert line.endswith("\n") and line.count("\n") == 1
    assert decode(line.encode()) == event


def test_a_resumed_run_begins_anew_and_keeps_its_step() -> None:
    state = fold(
        [
            START,
            events.Measured(2000, 1, {FIRST_STEP: 1.0}),
            events.Measured(3000, 20, {"train/loss": 2.0, "throughput/step_seconds": 0.5}),
            events.WorkerFailed(4000, 1, "node", "Traceback\n  ValueError: bad\n"),
            events.Ended(4000, "FAILED"),
        ]
    )
    assert (state.ended, state.step, state.loss, state.trains) == ("FAILED", 20, 2.0, True)
    assert state.failure == "rank 1 on node: ValueError: bad" and state.is_wanted
    state.take(events.Started(9000, "e", "n", "abc123"))
    assert (state.ended, state.attempts, state.began, state.failure, state.trains) == (None, 2, 9000, "", False)
    state.take(events.Rewound(9500, 10, "goes on from a checkpoint"))
    assert (state.step, state.loss) == (10, 2.0)


def test_a_job_in_the_queue_has_not_begun_and_is_not_wanted_yet() -> None:
    state = fold([START, events.Tagged(1100, {STATE_TAG: "queued"})])
    assert state.began is None and not state.is_wanted
    state.take(events.Tagged(5000, {STATE_TAG: "running"}))
    assert state.began == 5000 and state.is_wanted


def test_what_is_added_after_the_end_does_not_move_it() -> None:
    state = fold([START, events.Ended(4000, "FINISHED"), events.FileKept(9000, "model.onnx", "onnx")])
    assert (state.ended, state.ended_at, state.last) == ("FINISHED", 4000, 9000)
    state.take(events.Started(9500, "e", "n", "abc123"))
    assert state.ended_at is None


def test_a_summary_holds_until_the_run_goes_on() -> None:
    state = fold([START, events.Measured(2, 20, {"summary/tokens_per_second_median": 7.0})])
    assert state.median_rates == (7.0, None)
    state.take(events.Measured(3, 21, {"train/loss": 1.0, "throughput/tokens_per_second": 5.0}))
    assert state.median_rates == (None, None) and state.rates == (5.0, None)


def test_a_journal_without_a_whole_line_says_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.state() == RunState()
    run.journal_file.write_bytes(b'{"event": "start", "t": 1')
    assert run.state() == RunState() and list(iterate(run.journal_file)) == []
