"""A trial that the machine has failed is made once more."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from ortlaunch.launch.trial import Outcome
from ortlaunch.tune.cell import Cell, Effort
from ortlaunch.tune.notes import Notes
from ortlaunch.tune.space import Space
from ortlaunch.tune.trial import Trials

EFFORT = Effort("short", 0, 2.0, None, 60.0)
GOOD = Outcome("ok", 12.0, rate=80.0)
PORT = Outcome("failed", 12.0, reason="Address already in use", is_of_machine=True)
BAD = Outcome("failed", 12.0, reason="RuntimeError: no")


def test_a_failure_of_the_machine_is_tried_once_more_and_is_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = [PORT, GOOD, PORT, PORT, GOOD, BAD]
    monkeypatch.setattr(Trials, "_run_once", lambda *_: outcomes.pop(0))
    trials = Trials(cast(Space, None), tmp_path, None, lambda: 0, lambda run: None)
    cells = [Cell.of(workers=number) for number in (1, 2, 4)]
    trial = Notes(tmp_path / "notes").remembered(trials.run)
    found = [trial(cell, EFFORT) for cell in cells[:2]]
    assert [(one.status, one.seconds, one.is_of_machine) for one in found] == [
        ("ok", 24.0, False),
        ("failed", 24.0, True),
    ]
    # The next command: the first is noted, and the second is tried again.
    trial = Notes(tmp_path / "notes").remembered(trials.run)
    assert [trial(cell, EFFORT).is_noted for cell in cells[:2]] == [True, False]
    assert not trial(cells[2], EFFORT).is_of_machine
    assert outcomes == [], "a failure of the configuration is tried once"
