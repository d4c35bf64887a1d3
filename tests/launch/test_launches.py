"""What the command does when it is interrupted between two runs of a sweep."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest

from ortlaunch.base import exit_codes
from ortlaunch.verbs.run import _Launches


class Sweep:
    """Takes the place of a sweep of which the first run has ended, or of one that is to be queued."""

    def __init__(self, has_run: bool) -> None:
        self.has_run = has_run
        self.closed: list[int] = []

    def close(self, code: int) -> int:
        self.closed.append(code)
        return code


@pytest.mark.parametrize("has_run", [True, False], ids=["on this machine", "in a queue"])
def test_an_interrupt_between_two_runs_ends_their_sweep(monkeypatch: pytest.MonkeyPatch, has_run: bool) -> None:
    """MLflow would show it as running for ever. What is only planned is not submitted."""
    launches: Any = _Launches([], [], [], None)
    sweep = Sweep(has_run)

    def interrupted(*_: object) -> NoReturn:
        launches._multirun = sweep
        raise KeyboardInterrupt

    monkeypatch.setattr("ortlaunch.compose.hydra_tree.run_with_hydra", interrupted)
    # Out of a test, the exception would end pytest.
    try:
        code = launches.run()
    except KeyboardInterrupt:
        code = None
    assert code == (exit_codes.INTERRUPTED if has_run else None)
    assert sweep.closed == ([exit_codes.INTERRUPTED] if has_run else [])
