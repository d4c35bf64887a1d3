"""What happens at the end of a step, with a saver and a watch of the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from ortlaunch.config.schema import TrainConfig
from ortlaunch.trainer.checkpoint.saver import Written
from ortlaunch.trainer.step_end import StepEnd


class Watch:
    """Knows whether it is paused."""

    def __init__(self) -> None:
        self.is_paused = False

    def step_done(self, step: int) -> None:
        pass

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.is_paused = True
        yield
        self.is_paused = False


class Saver:
    """Is still writing the last checkpoint whenever it is asked; waits for it before it takes another, as the real."""

    def __init__(self, watch: Watch) -> None:
        self.saved: list[int] = []
        self.paused: list[bool] = []
        self._watch = watch
        self._is_writing = False

    def ended(self) -> list[Written]:
        return []

    def wait(self) -> list[Written]:
        if not self._is_writing:
            return []
        self._is_writing = False
        self.paused.append(self._watch.is_paused)
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
    facts: Any = SimpleNamespace(of_worker=dict, of_run=lambda step: {})
    step_end = StepEnd(cfg, nothing, saver, nothing, watch, nothing, None, facts)  # type: ignore[arg-type]
    for step in (1, 2, 3):
        assert step_end.run(step) is False
    assert saver.saved == [1, 2, 3]
    assert saver.paused == [True, True]
