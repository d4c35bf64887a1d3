"""What the schedule finds on made machines, what it never does, and that it goes on after a kill."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ortlaunch.base.errors import RequestError
from ortlaunch.launch.trial import Outcome
from ortlaunch.tune import schedule
from ortlaunch.tune.cell import Cell, Effort, Value
from ortlaunch.tune.intervals import LEAST_ROUNDS
from ortlaunch.tune.notes import Notes
from ortlaunch.tune.plan import Finding, Plan
from ortlaunch.tune.pruning import Dominance
from ortlaunch.tune.schedule import Schedule
from tests.tune import pretend
from tests.tune.objective import Machine

SMALL: dict[str, list[Value]] = {
    "backend": ["eager", "compile", "ort"],
    "trainer": ["single", "ddp"],
    "workers": [1, 2],
    "micro_batch": [1, 4, 16],
    "checkpointing": ["off", "on"],
}
A, B, C = (Cell.of(backend=name) for name in ("a", "b", "c"))


def made(speeds: dict[Cell, float], wobble: dict[Cell, float] | None = None) -> tuple[Plan, list[tuple[Cell, Effort]]]:
    """A plan over cells of known speeds, and the trials that are made; speeds wobble up and down by a share."""
    trials: list[tuple[Cell, Effort]] = []

    def trial(cell: Cell, effort: Effort) -> Outcome:
        trials.append((cell, effort))
        share = (wobble or {}).get(cell, 0.0) * (-1) ** len([one for one, _ in trials if one == cell])
        if not speeds[cell]:
            return Outcome("failed", 5.0, reason="it always fails")
        return Outcome("ok", 10.0, rate=speeds[cell] * (1 + share))

    return Plan(list(speeds), next(iter(speeds)), Dominance(), trial, 600.0, math.inf), trials


@pytest.mark.parametrize("seed", range(3))
def test_it_finds_nearly_the_best_of_a_small_space_for_less_than_all_of_it(seed: int) -> None:
    machine = Machine(seed, SMALL, noise=0.01, failing=0.0, hanging=0.0)
    finding = Schedule(machine.plan(3600.0)).run()
    assert finding.winner is not None
    assert machine.speed(finding.winner) >= 0.97 * machine.speed(machine.best())
    assert len(finding.measured) < len(machine.cells)
    assert finding.score == pytest.approx(machine.speed(finding.winner), rel=0.05)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 60))
def test_on_any_machine_it_keeps_its_budget_and_repeats_nothing(seed: int, trials: int) -> None:
    machine = Machine(seed, SMALL, failing=0.1, hanging=0.05)
    budget = 12.0 * trials
    finding = Schedule(machine.plan(budget)).run()
    asked = [(cell, effort.stage, effort.number) for cell, effort in machine.trials]
    assert len(asked) == len(set(asked))
    # The last trials begin before the end and may hang; the winner and what was asked for are measured once more.
    longest = max(effort.timeout for _, effort in machine.trials)
    assert machine.spent <= budget + 3 * longest
    assert finding.spent == pytest.approx(machine.spent)
    if finding.winner is not None:
        assert machine.fits(finding.winner)
    told = finding.pruned.keys() | finding.measured.keys()
    assert told == set(machine.cells)
    assert all(finding.pruned.values())


def test_the_winner_is_parted_from_the_others_by_rounds_and_measured_once_more() -> None:
    plan, trials = made({A: 100.0, B: 110.0, C: 104.0}, {A: 0.01, B: 0.01, C: 0.01})
    finding = Schedule(plan).run()
    assert (finding.winner, finding.ties) == (B, [])
    rounds = [(effort.number, cell) for cell, effort in trials if effort.stage == "round"]
    assert {cell for number, cell in rounds if number == 0} == {A, B, C}
    # The rounds are interleaved, and each cell begins one of them.
    assert {cell for number, cell in rounds if number == 1} == {A, B, C}
    assert len({rounds[3 * number][1] for number in range(LEAST_ROUNDS)}) == 3
    assert [(cell, effort.stage) for cell, effort in trials[-2:]] == [(B, "again"), (A, "again")]
    assert finding.asked_score == pytest.approx(100.0, rel=0.02)
    assert finding.interval is not None
    assert finding.interval[0] < 110 < finding.interval[1]
    assert "slower than the winner in the rounds" in finding.dropped[A]


def test_what_cannot_be_parted_is_a_tie_and_the_configuration_as_asked_is_kept() -> None:
    plan, trials = made({A: 100.0, B: 102.0}, {A: 0.1})
    finding = Schedule(plan).run()
    assert (finding.winner, finding.ties) == (A, [B])
    assert max(effort.number for _, effort in trials if effort.stage == "round") > LEAST_ROUNDS


@pytest.mark.parametrize(("speed", "winner", "ties"), [(140.0, B, []), (102.0, A, [B])])
def test_without_time_for_rounds_what_is_asked_is_kept_only_if_it_is_nearly_as_fast(
    speed: float, winner: Cell, ties: list[Cell]
) -> None:
    plan, trials = made({A: 100.0, B: speed})
    finding = Schedule(replace(plan, budget=60.0)).run()
    assert len([1 for _, effort in trials if effort.stage == "round"]) < 2 * LEAST_ROUNDS
    assert (finding.winner, finding.ties) == (winner, ties)
    if winner == B:
        assert finding.dropped[A] == "slower, in fewer than 3 rounds"


def test_equal_ones_are_not_measured_for_ever() -> None:
    plan, trials = made({A: 100.0, B: 100.1})
    assert Schedule(plan).run().ties == [B]
    assert max(effort.number for _, effort in trials if effort.stage == "round") == LEAST_ROUNDS - 1


def test_much_slower_ones_get_no_longer_trial() -> None:
    plan, trials = made({A: 100.0, B: 50.0})
    finding = Schedule(plan).run()
    assert finding.dropped[B] == "50% slower than the best in its short trial"
    assert {effort.stage for cell, effort in trials if cell == B} == {"short"}


def test_the_start_counts_over_the_steps_of_the_run() -> None:
    speeds = {A: 100.0, B: 120.0}

    def trial(cell: Cell, effort: Effort) -> Outcome:
        return Outcome("ok", 10.0, rate=speeds[cell], start=20.0 if cell == B else 0.0)

    def winner(work: float) -> Cell | None:
        return Schedule(Plan([A, B], A, Dominance(), trial, 600.0, work)).run().winner

    # 20 s of export are paid for after 12,000 samples.
    assert (winner(6_000.0), winner(24_000.0)) == (A, B)


def test_what_the_search_had_no_hope_of_is_not_told_to_have_had_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_NO_BETTER", math.inf), ("_LEAST_IDLE", 0), ("_IDLE", 0.0)):
        monkeypatch.setattr(schedule, name, value)

    def trial(cell: Cell, effort: Effort) -> Outcome:
        seconds = 10.0 if effort.stage in ("probe", "short") else 200.0
        return Outcome("ok", seconds, rate=100.0 + int(cell["micro_batch"]))

    cells = [Cell.of(micro_batch=size) for size in range(1, 11)]
    finding = Schedule(Plan(cells, cells[0], Dominance(), trial, 600.0, math.inf)).run()
    # The rounds took the time, after the search had ended by itself.
    assert finding.spent > 600.0
    assert set(finding.pruned.values()) == {schedule.NO_GAIN}


def test_an_export_that_only_the_first_trial_pays_for_does_not_rule_out_the_fastest() -> None:
    rates = {A: 100.0, B: 200.0}
    exported: set[Cell] = set()

    def trial(cell: Cell, effort: Effort) -> Outcome:
        start = 60.0 if cell == B and cell not in exported else 1.0
        exported.add(cell)
        return Outcome("ok", 10.0, rate=rates[cell], start=start)

    # 4,000 samples take A 41 s, and B 80 s the first time and 21 s from then on.
    assert Schedule(Plan([A, B], A, Dominance(), trial, 600.0, 4000.0)).run().winner == B


def test_a_winner_that_is_unfit_gives_way_to_the_next() -> None:
    plan, _ = made({A: 100.0, B: 140.0, C: 130.0})
    finding = Schedule(replace(plan, unfit=lambda cell: "not fit" if cell in (B, C) else None)).run()
    assert finding.winner == A
    assert (finding.dropped[B], finding.dropped[C]) == ("not fit", "not fit")


def test_a_space_in_which_nothing_trains_has_no_winner() -> None:
    plan, _ = made({A: 0.0, B: 0.0})
    finding = Schedule(plan).run()
    assert finding.winner is None
    assert finding.score == 0.0


def test_while_nothing_has_trained_the_minutes_are_used_to_the_end() -> None:
    timeouts: list[float] = []

    def trial(cell: Cell, effort: Effort) -> Outcome:
        timeouts.append(effort.timeout)
        if len(timeouts) < 4:
            return Outcome("time-out", effort.timeout, reason="it hangs")
        return Outcome("ok", 10.0, rate=100.0)

    cells = [Cell.of(micro_batch=size) for size in range(1, 9)]
    finding = Schedule(Plan(cells, cells[0], Dominance(), trial, 600.0, math.inf)).run()
    assert timeouts[:4] == [300.0, 150.0, 75.0, 60.0]
    assert finding.winner is not None


def test_where_only_checkpointing_is_searched_nothing_waits_for_the_same_without_it() -> None:
    cells = [Cell.of(micro_batch=size, checkpointing="on") for size in (1, 2, 4)]
    plan, _ = made({cell: 100.0 * int(cell["micro_batch"]) for cell in cells})
    finding = Schedule(plan).run()
    assert finding.winner == cells[-1]
    assert finding.pruned == {}


def test_checkpointing_is_tried_where_the_same_without_it_was_left_out_for_its_memory() -> None:
    cells = [Cell.of(micro_batch=size, checkpointing=how) for size in (1, 2, 4, 8) for how in ("off", "on")]

    def trial(cell: Cell, effort: Effort) -> Outcome:
        fits = int(cell["micro_batch"]) <= (1 if cell["checkpointing"] == "off" else 4)
        return Outcome("ok", 10.0, rate=100.0 * int(cell["micro_batch"])) if fits else Outcome("out of memory", 5.0)

    finding = Schedule(Plan(cells, cells[0], Dominance(), trial, 1200.0, math.inf)).run()
    assert finding.winner == Cell.of(micro_batch=4, checkpointing="on")


def test_all_trials_of_a_cell_count_and_only_the_start_of_the_latest() -> None:
    rates = iter([50.0, 100.0, 121.0])
    starts = iter([9.0, 7.0, 1.0])

    def trial(cell: Cell, effort: Effort) -> Outcome:
        return Outcome("ok", 10.0, rate=next(rates), start=next(starts))

    search = Schedule(Plan([A], A, Dominance(), trial, 600.0, 1100.0))
    for stage in ("probe", "short", "long"):
        search._try(A, stage, 0, 2.0)  # type: ignore[arg-type]
    # A probe of few steps is replaced: 1,100 samples at 110 samples/s, the mean of the two others, and a second.
    assert search._scores[A] == pytest.approx(1100 / 11)


def test_a_cell_that_the_estimate_refuses_is_never_tried() -> None:
    plan, trials = made({A: 100.0, B: 150.0})
    finding = Schedule(replace(plan, estimated=lambda cell, seen: "too large" if cell == B else None)).run()
    assert finding.pruned[B] == "too large"
    assert {cell for cell, _ in trials} == {A}


def test_trials_expect_the_speed_that_was_seen_and_get_a_timeout_by_it() -> None:
    plan, trials = made({A: 100.0, B: 90.0})
    Schedule(plan).run()
    efforts = [effort for _, effort in trials]
    assert (efforts[0].stage, efforts[0].rate, efforts[0].seconds) == ("probe", None, 0.0)
    assert efforts[1].rate == 100.0
    assert efforts[0].timeout == 300.0
    # The first trial of another backend may have to compile; the next one of it may not take as long.
    assert efforts[2].timeout == 150.0
    assert {effort.timeout for effort in efforts[3:]} == {60.0 + 3 * 10.0}


def test_a_backend_whose_first_trial_compiles_for_long_is_not_ended_by_the_pace_of_the_others() -> None:
    built: set[object] = {"eager"}
    timeouts: list[float] = []

    def trial(cell: Cell, effort: Effort) -> Outcome:
        seconds = 10.0 if cell["backend"] in built else 120.0
        if cell["backend"] == "compile":
            timeouts.append(effort.timeout)
        if seconds > effort.timeout:
            return Outcome("time-out", effort.timeout, reason="not done")
        built.add(cell["backend"])
        return Outcome("ok", seconds, rate=200.0 if cell["backend"] == "compile" else 100.0)

    cells = [Cell.of(backend=name, micro_batch=size) for name in ("eager", "compile") for size in (4, 8)]
    finding = Schedule(Plan(cells, cells[0], Dominance(), trial, 900.0, math.inf)).run()
    assert finding.winner is not None
    assert finding.winner["backend"] == "compile"
    assert timeouts[0] == 225.0


def summary(finding: Finding) -> object:
    return finding.winner, finding.score, finding.spent, sorted(map(str, finding.measured))


def test_after_a_kill_the_same_search_goes_on_and_finds_the_same(tmp_path: Path) -> None:
    whole, machine = pretend.searched(tmp_path / "whole")
    notes = tmp_path / "notes"
    command = [sys.executable, "-m", "tests.tune.pretend", str(notes), "7"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert process.stdout is not None
    for _ in range(7):
        assert process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = notes.read_text().splitlines()
    assert 6 <= len(before) < len(machine.trials)
    # A kill may cut a line off; the trial of that line is made again, and no other.
    notes.write_text(notes.read_text()[:-20])
    finding, again = pretend.searched(notes)
    assert summary(finding) == summary(whole)
    assert len(again.trials) == len(machine.trials) - (len(before) - 1)
    assert [json.loads(line)["key"] for line in notes.read_text().splitlines() if line.endswith("}}")][:3] == [
        json.loads(line)["key"] for line in before[:3]
    ]


def test_an_outcome_that_another_version_has_noted_otherwise_is_measured_again(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    values = [
        {"status": "ok", "samples_per_second": 7.0},
        7,
        None,
        {"status": "ok", "seconds": 9.0, "rate": 5, "newer": 1},
    ]
    values += [{"status": "lost", "seconds": 9.0}, {"status": "ok", "seconds": 9.0, "rate": "fast"}]
    values += [{"status": "ok", "seconds": 9.0}, {"status": "ok", "seconds": 9.0, "rate": 0.0}]
    notes.write_text(
        "".join(json.dumps({"key": f"short {one} {A}", "value": value}) + "\n" for one, value in enumerate(values))
    )
    trial = Notes(notes).remembered(lambda cell, effort: Outcome("ok", 10.0, rate=100.0))
    found = [trial(A, Effort("short", number, 2.0, None, 60.0)) for number in range(8)]
    assert [one.is_noted for one in found] == [number == 3 for number in range(8)]


@pytest.mark.parametrize(("others", "made_again"), [(0.1, False), (0.9, True)])
def test_a_time_out_beside_other_work_is_no_result_for_later(tmp_path: Path, others: float, made_again: bool) -> None:
    for number in range(2):
        late = Notes(tmp_path / "notes").remembered(lambda cell, effort: Outcome("time-out", 60.1, others=others))
        assert late(A, Effort("short", 0, 2.0, None, 60.0)).is_noted == (number == 1 and not made_again)


def test_a_trial_that_did_not_end_is_made_again_when_it_may_take_twice_as_long(tmp_path: Path) -> None:
    timeouts: list[float] = []

    def trial(cell: Cell, effort: Effort) -> Outcome:
        timeouts.append(effort.timeout)
        return Outcome("time-out", effort.timeout + 0.1)

    for timeout in (60.0, 60.0, 90.0, 150.0, 150.0):
        notes = Notes(tmp_path / "notes").remembered(trial)
        notes(Cell.of(backend="compile"), Effort("short", 0, 2.0, None, timeout))
    assert timeouts == [60.0, 150.0]


@pytest.mark.parametrize("kind", ["a folder", "a FIFO"])
def test_notes_that_are_no_file_are_one_message(tmp_path: Path, kind: str) -> None:
    notes = tmp_path / "notes.jsonl"
    if kind == "a folder":
        notes.mkdir()
    else:
        os.mkfifo(notes)
    with pytest.raises(RequestError, match=f"^{notes} cannot be read: it is {kind} and no plain file: move it away"):
        Notes(notes)


def test_more_minutes_go_on_with_what_was_found(tmp_path: Path) -> None:
    machine = Machine(3, SMALL, noise=0.0, failing=0.0, hanging=0.0)
    trial = Notes(tmp_path / "notes").remembered(machine.trial)
    said: list[str] = []
    Schedule(replace(machine.plan(200.0), trial=trial), said.append).run()
    first = len(machine.trials)
    assert not [line for line in said if "noted before" in line]
    said.clear()
    begun = time.monotonic()
    noted = Notes(tmp_path / "notes").remembered(machine.trial)
    Schedule(replace(machine.plan(200.0), trial=noted), said.append).run()
    assert len(machine.trials) == first, time.monotonic() - begun
    assert len([line for line in said if line.endswith(" s, noted before)")]) == first
    Schedule(replace(machine.plan(2000.0), trial=Notes(tmp_path / "notes").remembered(machine.trial))).run()
    keys = [f"{effort.stage} {effort.number} {cell}" for cell, effort in machine.trials]
    assert len(keys) > first
    assert len(keys) == len(set(keys))


def test_more_minutes_measure_the_winner_beside_what_is_asked_once_more(tmp_path: Path) -> None:
    plan, trials = made({A: 100.0, B: 140.0, C: 120.0})
    for budget in (60.0, 600.0):
        trials.clear()
        notes = Notes(tmp_path / "notes")
        finding = Schedule(replace(plan, budget=budget, trial=notes.remembered(plan.trial))).run()
        assert finding.winner is not None
        assert finding.winner != A
        assert [(cell, effort.stage) for cell, effort in trials[-2:]] == [(finding.winner, "again"), (A, "again")]
    # After an interruption at the very end nothing is measured twice.
    trials.clear()
    Schedule(replace(plan, budget=600.0, trial=Notes(tmp_path / "notes").remembered(plan.trial))).run()
    assert trials == []
