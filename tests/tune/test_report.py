"""What a user reads at the end of a tuning."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from ortlaunch.launch.trial import Outcome
from ortlaunch.tune.report import render, report_of
from ortlaunch.tune.search import Effort, Plan, Search
from ortlaunch.tune.space import MICRO, Cell, Space

WORDS = ("model=mlp", "device=cpu", "backend=eager", "trainer=single", "launcher.workers_per_node=1")
SECONDS = 20.0


def read(minutes: float, others: float = 0.0, asked: int = 4, disk: int = 0) -> str:
    """The text about a space of three micro-batches, of which the larger ones are faster."""
    batch = [f"train.batch_size={asked}", f"train.grad_accumulation={4 // asked}"]
    space = Space([*WORDS, *batch, "train.activation_checkpointing=false"])

    def trial(cell: Cell, effort: Effort) -> Outcome:
        if cell[MICRO] == disk:
            return Outcome("failed", seconds=SECONDS, reason="No space left on device", is_of_machine=True)
        return Outcome("ok", seconds=SECONDS, rate=100.0 * int(cell[MICRO]), peak_bytes=2**30, others=others)

    return text_of(found(space, trial, minutes))


def found(space: Space, trial: Callable[[Cell, Effort], Outcome], minutes: float) -> dict[str, Any]:
    result = report_of(Search(Plan(space.cells, trial, 60 * minutes, 1e6)).run(), space, 1e6)
    return result | {"minutes": minutes, "command": "a command", "compare": [], "folder": "/f"}


def text_of(result: dict[str, Any], columns: int | None = None) -> str:
    output = io.StringIO()
    render(result, Console(file=output, width=columns, force_terminal=columns is not None))
    return output.getvalue()


def test_configurations_without_time_are_counted_and_the_way_out_is_named() -> None:
    text = read(0.5)
    assert "! 2 of 3 configurations had no time: the same command with more --minutes goes on\n" in text
    assert "not tried: 2 x no time for it in the minutes given\n" in text
    assert " of 1 configuration in 0." in text
    assert "had no time" not in read(60)


def test_another_micro_batch_is_told_of_since_batchnorm_sees_it() -> None:
    line = "! the winner has another micro-batch than asked: a model with BatchNorm computes its statistics over it"
    assert line in read(60, asked=1)
    assert line not in read(60, asked=4)


def test_a_busy_machine_is_told_of() -> None:
    assert "! other processes had up to 40% of the cores in " in read(60, others=0.4)
    assert "other processes" not in read(60, others=0.05)


def test_a_failure_of_the_machine_is_told_of() -> None:
    line = "! 1 configuration failed by something on this machine: the same command tries again"
    assert line in read(60, disk=2)
    assert line not in read(60)


def test_a_space_that_does_not_fit_is_told_of_in_few_lines() -> None:
    space = Space([*WORDS, "train.batch_size=64"])
    text = text_of(found(space, lambda cell, effort: Outcome("out of memory", 5.0, reason="no memory"), 60))
    tried = text.count("out of memory: no memory")
    assert f"not tried: {len(space.cells) - tried} x needs more memory than one that does not fit\n" in text
    assert text.endswith("no configuration trained; what each trial printed is in /f/trials\n")


def test_speeds_in_the_table_are_those_of_the_intervals() -> None:
    speeds = itertools.cycle([100.0, 103.0, 96.0, 101.0, 98.0, 104.0, 97.0])
    space = Space([*WORDS, "train.batch_size=4", "train.activation_checkpointing=false"])
    result = found(space, lambda cell, effort: Outcome("ok", 10.0, rate=next(speeds), start=1.0), 60)
    rows = [row for row in result["trials"] if row["interval"]]
    assert len(rows) > 1
    for row in rows:
        low, high = row["interval"]
        assert row["score"] * row["score"] == pytest.approx(low * high)
        assert row["score"] < row["rate"]


@pytest.mark.parametrize("columns", [None, 125, 160])
def test_a_long_error_keeps_the_table_within_the_terminal(columns: int | None) -> None:
    """Without a terminal within 120 columns. An error is no markup, and the report has all of it."""
    error = "RuntimeError: [/bold] " + " ".join(f"word{number}" for number in range(100))
    space = Space([*WORDS, "train.batch_size=4", "launcher.threads=1,2", "launcher.allocator=system,keep"])

    def trial(cell: Cell, effort: Effort) -> Outcome:
        if cell[MICRO] == 2:
            return Outcome("failed", seconds=SECONDS, reason=error)
        return Outcome("ok", seconds=SECONDS, rate=123_456.7, start=12.0, peak_bytes=2**30)

    result = found(space, trial, 60)
    assert f"failed: {error}" in {row["verdict"] for row in result["trials"]}
    lines = text_of(result, columns).splitlines()
    table = list(itertools.takewhile(lambda line: " trials of " not in line, lines))
    assert 60 < max(map(len, table)) <= (columns or 120)
    assert "word9" in "".join(table)
