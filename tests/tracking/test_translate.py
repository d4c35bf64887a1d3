"""Journal events become what MLflow takes, each point once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ortlaunch.run.events import Event, decode
from ortlaunch.tracking.translate import (
    PARAM_LIMIT,
    Artifact,
    Ended,
    Params,
    Point,
    Points,
    Reopened,
    Tags,
    Translator,
    fitted,
    safe_key,
)


def event(kind: str, t: int = 1, **fields: Any) -> Event:
    found = decode(json.dumps({"event": kind, "t": t, **fields}).encode())
    assert found is not None
    return found


START = event("start", experiment="e", name="n", run_id="r")


def metrics(step: int, t: int, **values: float) -> Event:
    return event("metrics", t, step=step, values=values)


def test_rewound_steps_are_sent_once_and_new_ones_between_them_too() -> None:
    translator = Translator()
    first = translator.translate([metrics(10, 1, a=1.0), metrics(20, 2, a=2.0, b=5.0)])
    second = translator.translate([metrics(15, 3, a=9.0), metrics(20, 4, a=9.0, c=7.0), metrics(30, 5, a=3.0)])
    assert first == [Points([Point("a", 1.0, 1, 10), Point("a", 2.0, 2, 20), Point("b", 5.0, 2, 20)])]
    assert second == [Points([Point("a", 9.0, 3, 15), Point("c", 7.0, 4, 20), Point("a", 3.0, 5, 30)])]


def test_a_rewind_is_noted_and_sends_nothing() -> None:
    translator = Translator()
    translator.translate([metrics(10, 1, a=1.0), metrics(20, 2, a=2.0)])
    rewound = translator.translate([event("rewind", step=10, reason="a worker died"), metrics(20, 4, a=2.0)])
    assert rewound == []
    assert len(translator.notes) == 1 and "step 10: a worker died" in translator.notes[0]
    assert translator.translate([metrics(30, 5, a=3.0)]) == [Points([Point("a", 3.0, 5, 30)])]


def resumed(**changed: str) -> list[Event]:
    """The beginning of a second attempt that goes on after step 10, with changed parameters."""
    params = {"optimizer.lr": "0.1", "train.log_every": "10", "train.resume": "never"} | changed
    return [START, event("params", values=params), event("rewind", step=10, reason="goes on")]


@pytest.mark.parametrize(
    ("changed", "is_sent"),
    [
        ({}, False),
        ({"optimizer.lr": "0.01"}, True),
        ({"launcher.workers_per_node": "4"}, False),  # It was not said before.
        ({"train.log_every": "5", "train.resume": "auto"}, False),
    ],
)
def test_steps_that_are_trained_again_with_other_numbers_are_sent_again(changed: dict[str, str], is_sent: bool) -> None:
    """Else the curve would show the steps that diverged, and not those that the weights come from."""
    translator = Translator()
    translator.translate([*resumed()[:2], metrics(10, 1, a=1.0), metrics(20, 2, a=99.0)])
    found = translator.translate([*resumed(**changed), metrics(20, 4, a=2.0)])
    assert (Points([Point("a", 2.0, 4, 20)]) in found) == is_sent
    assert any("11 to 20" in note and "optimizer.lr" in note for note in translator.notes) == is_sent
    # torchrun's restarts within the attempt compute what it has computed.
    again = [event("rewind", step=10, reason="a worker died"), metrics(10, 5, a=1.0), metrics(20, 6, a=2.0)]
    assert translator.translate(again) == []


def test_the_goodput_of_a_later_end_is_sent_though_it_is_at_the_same_step() -> None:
    def account(t: int, percent: float) -> Event:
        return event("metrics", t, step=50, values={"summary/goodput_percent": percent, "summary/last_step": 50.0})

    translator = Translator()
    translator.translate([account(1, 90.0)])
    assert translator.translate([account(2, 40.0)]) == [Points([Point("summary/goodput_percent", 40.0, 2, 50)])]


def test_each_attempt_from_one_checkpoint_has_its_start() -> None:
    translator = Translator()
    for t in (1, 2):
        found = translator.translate([event("metrics", t, step=40, values={"startup/import_seconds": 2.0})])
        assert found == [Points([Point("startup/import_seconds", 2.0, t, 40)])]


def test_end_comes_after_what_was_before_it() -> None:
    operations = Translator().translate(
        [
            START,
            event("tags", values={"x": "1"}),
            metrics(1, 1, a=1.0),
            event("artifact", path="f", artifact_path=""),
            event("end", 9, status="FAILED"),
            START,
            event("tags", values={"x": "2"}),
            event("end", 12, status="FINISHED"),
        ]
    )
    assert operations == [
        Artifact("f", ""),
        Tags({"x": "1"}),
        Points([Point("a", 1.0, 1, 1)]),
        Ended("FAILED", 9),
        Reopened(),
        Tags({"x": "2"}),
        Ended("FINISHED", 12),
    ]


def test_second_start_without_an_end_reopens_nothing() -> None:
    assert Translator().translate([START, START]) == []


def test_parameter_keeps_its_first_value_and_a_tag_has_the_last() -> None:
    translator = Translator()
    assert translator.translate([event("params", values={"a": "1", "b": "2"})]) == [Params({"a": "1", "b": "2"})]
    second = translator.translate([event("params", values={"a": "3", "b": "2", "c": "4"})])
    assert second == [Params({"c": "4"}), Tags({"ortlaunch.changed.a": "3"})]
    assert len(translator.notes) == 1 and "'a'" in translator.notes[0]
    assert translator.translate([event("params", values={"a": "1", "b": "2"})]) == [Tags({"ortlaunch.changed.a": "1"})]
    assert translator.translate([event("params", values={"a": "1", "c": "4"})]) == []


def test_first_failure_of_an_attempt_is_the_tag() -> None:
    translator = Translator()
    fail = [event("failure", rank=rank, host="n1", message=f"m{rank}") for rank in (3, 0)]
    assert translator.translate([START, *fail]) == [Tags({"ortlaunch.failure": "rank 3 on n1: m3"})]
    assert translator.translate([START, fail[1]]) == [Tags({"ortlaunch.failure": "rank 0 on n1: m0"})]


@pytest.mark.parametrize(
    ("key", "safe"),
    [
        ("train/loss", "train/loss"),
        ("optim[0]@x", "optim_0__x"),
        ("größe.x y:z-1", "größe.x y:z-1"),
        ("/a//b/../c/", "a/c"),
        ("../x", "x"),
        (".", "_"),
        ("", "_"),
        ("k" * 300, "k" * 250),
    ],
)
def test_safe_key(key: str, safe: str) -> None:
    assert safe_key(key) == safe


def test_fitted_shortens_with_a_note_and_cleans() -> None:
    long = fitted("x" * 7000, PARAM_LIMIT)
    assert len(long) == PARAM_LIMIT and long.endswith("… [shortened from 7000 characters]")
    assert fitted("a\0b\udcff", PARAM_LIMIT) == "ab?" and fitted("x" * PARAM_LIMIT, PARAM_LIMIT) == "x" * PARAM_LIMIT


def test_unknown_kind_is_noted() -> None:
    translator = Translator()
    assert translator.translate([event("dance")]) == [] and "dance" in translator.notes[0]
