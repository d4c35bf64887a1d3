"""What happens between two steps, with the saver and the watch made by the test."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ortlaunch.config.schema import TrainConfig
from ortlaunch.trainer.boundary import Boundary
from ortlaunch.trainer.checkpoint.saver import Written


class Watch:
    """Knows whether it has been told to be patient."""

    def __init__(self) -> None:
        self.is_patient = False

    def step_done(self, step: int) -> None:
        pass

    def through(self, act: Callable[[], Any]) -> Any:
        self.is_patient = True
        try:
            return act()
        finally:
            self.is_patient = False


class Saver:
    """Is still writing the last checkpoint whenever it is asked; waits for it before it takes another, as the real."""

    def __init__(self, watch: Watch) -> None:
        self.saved: list[int] = []
        self.patient: list[bool] = []
        self._watch = watch
        self._is_writing = False

    def ended(self) -> list[Written]:
        return []

    def wait(self) -> list[Written]:
        if not self._is_writing:
            return []
        self._is_writing = False
        self.patient.append(self._watch.is_patient)
        return [Written(self.saved[-1], 1.0, "")]

    def save(self, step: int, *_rest: Any) -> list[Written]:
        ended = self.wait()
        self.saved.append(step)
        self._is_writing = True
        return ended


def test_a_disk_that_is_slower_than_the_steps_is_waited_for() -> None:
    """Else a checkpoint that takes longer than launcher.timeout_seconds would end the run as one that hangs."""
    watch = Watch()
    saver = Saver(watch)
    nothing: Any = SimpleNamespace(
        snapshot=None, guard=SimpleNamespace(read=lambda: (0, 0)), agreed=lambda: False, restart_clock=lambda: None
    )
    cfg = TrainConfig(steps=9, checkpoint_every=1)
    boundary = Boundary(cfg, nothing, saver, nothing, watch, nothing, None, lambda step: ({}, {}))  # type: ignore[arg-type]
    for step in (1, 2, 3):
        assert boundary.passed(step) is False
    assert saver.saved == [1, 2, 3]
    assert saver.patient == [True, True]
