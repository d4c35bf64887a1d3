"""What a run's events amount to."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.run import events
from ortlaunch.run.events import Event, decode, encode
from ortlaunch.run.journal import iterate
from ortlaunch.run.run import Run
from ortlaunch.run.state import FIRST_STEP, STATE_TAG, RunState, fold

START = events.Started(1000, "e", "n", "abc123")


KINDS = [cls for cls in Event.__subclasses__() if cls is not events.Unknown]


def text(draw: random.Random) -> str:
    return "".join(chr(draw.choice((draw.randrange(32, 127), draw.randrange(0x80, 0xD800)))) for _ in range(12))


VALUES: dict[Any, Callable[[random.Random], Any]] = {
    "int": lambda draw: draw.randrange(2**40),
    "str": text,
    "Status": lambda draw: draw.choice(["FINISHED", "FAILED", "KILLED"]),
    "dict[str, str]": lambda draw: {text(draw): text(draw)},
    "dict[str, float]": lambda draw: {text(draw): draw.uniform(-1e9, 1e9), "inf": float("inf"), "-inf": float("-inf")},
}
"""Draws a value by a field's type."""


@pytest.mark.parametrize("kind", KINDS, ids=lambda cls: cls.__name__)
def test_an_event_of_any_kind_comes_back_as_it_was(kind: type[Event]) -> None:
    draw = random.Random(kind.kind)
    for _ in range(20):
        event = kind(**{field.name: VALUES[field.type](draw) for field in fields(kind)})
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
    # The second one lacks its newline only, so that its writer may not have written all of it.
    for torn in ('{"event": "start", "t": 1', encode(START).rstrip("\n")):
        run.journal_file.write_text(torn)
        assert run.state() == RunState() and list(iterate(run.journal_file)) == []
