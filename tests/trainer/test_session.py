"""What happens at the end of a step, with a saver and a watch of the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ortlaunch.base.errors import TrainingError
from ortlaunch.config.schema import TrainConfig
from ortlaunch.data.position import Position
from ortlaunch.trainer.checkpoint.resume import Start
from ortlaunch.trainer.checkpoint.saver import Written
from ortlaunch.trainer.session import Session


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

    def __init__(self, watch: Watch, error: str = "") -> None:
        self.saved: list[int] = []
        self.copied: list[bool] = []
        self.kept: list[bool] = []
        self.refusals: list[str] = []
        self.paused: list[bool] = []
        self.longest: float | None = None
        self._watch = watch
        self._error = error
        self._is_writing = False

    def ended(self) -> list[Written]:
        return []

    def wait(self, seconds: float | None = None) -> list[Written]:
        self.longest = seconds
        if not self._is_writing:
            return []
        self._is_writing = False
        self.paused.append(self._watch.is_paused)
        return [Written(self.saved[-1], 1.0, self._error)]

    def save(
        self, step: int, _snapshot: Any, _own: Any, _meta: Any, refusal: str, *, shared: bool, keep_memory: bool
    ) -> list[Written]:
        ended = self.wait()
        self.saved.append(step)
        self.refusals.append(refusal)
        self.copied.append(not shared)
        self.kept.append(keep_memory)
        self._is_writing = True
        return ended


def session_of(
    cfg: TrainConfig, saver: Saver, watch: Watch, *, stops: bool = False, bad: tuple[int, int] = (0, 0)
) -> Session:
    nothing: Any = SimpleNamespace(
        snapshot=None,
        guard=SimpleNamespace(read=lambda: bad),
        agreed=lambda: stops,
        check_agreement=lambda: None,
        close=lambda: None,
        restart_clock=lambda: None,
        stop=lambda: None,
        position=Position(),
        task=SimpleNamespace(state=dict),
    )
    session: Any = object.__new__(Session)
    session.config = SimpleNamespace(train=cfg, launcher=SimpleNamespace(grace_seconds=7))
    session.start, session.stopped_at, session.journal = Start(), None, None
    session.values, session.best, session.own, session.last_step = {}, None, {}, cfg.steps
    session.watch, session.engine, session.recorder = watch, nothing, nothing
    session.system = SimpleNamespace(sampler=nothing)
    session._saver, session._stop, session._feed = saver, nothing, nothing
    session._built = SimpleNamespace(loader=nothing)
    session._facts = lambda step: {}
    return cast(Session, session)


def end(session: Session, step: int) -> bool:
    """Ends a step as the loop does; returns whether training stops there."""
    if session.saves(step):
        session.save(step)
    return session.stopped_at is not None


def fail(session: Session) -> None:
    with pytest.raises(KeyError), session.finishing_checkpoints():
        raise KeyError


def test_a_disk_that_is_slower_than_the_steps_is_waited_for() -> None:
    """Else a checkpoint that takes longer than launcher.timeout_seconds would end the run as one that hangs."""
    watch = Watch()
    saver = Saver(watch)
    session = session_of(TrainConfig(steps=9, checkpoint_every=1), saver, watch)
    for step in (1, 2, 3):
        assert end(session, step) is False
    assert saver.saved == [1, 2, 3]
    assert saver.paused == [True, True]


def test_a_failure_waits_for_the_checkpoint_and_stays_what_it_is() -> None:
    watch = Watch()
    saver = Saver(watch)
    session = session_of(TrainConfig(steps=9, checkpoint_every=1), saver, watch)
    end(session, 1)
    fail(session)
    assert (saver.paused, saver.longest) == ([True], 7.0)
    saver.wait = lambda seconds=None: 1 / 0  # type: ignore[method-assign, assignment]
    fail(session)


@pytest.mark.parametrize("is_async", [True, False])
def test_only_a_checkpoint_beside_further_steps_is_a_copy(is_async: bool) -> None:
    watch = Watch()
    saver = Saver(watch)
    session = session_of(TrainConfig(steps=3, checkpoint_every=1, checkpoint_async=is_async), saver, watch)
    for step in (1, 2, 3):
        end(session, step)
    assert saver.copied == [is_async, is_async, False]
    # Without a copy, no step may begin before the checkpoint is written.
    assert len(saver.paused) == 2
    session.finish()
    assert len(saver.paused) == 3


@pytest.mark.parametrize(
    ("steps", "every", "is_async", "kept"),
    [
        (7, 2, True, [True, True, False, False]),
        (6, 2, True, [True, False, False]),
        (4, 2, True, [False, False]),
        (6, 2, False, [False, False, False]),
    ],
)
def test_memory_is_kept_only_for_a_further_checkpoint_that_is_a_copy(
    steps: int, every: int, is_async: bool, kept: list[bool]
) -> None:
    """Else a run would hold a second copy of its state to its end, or one that nothing uses again."""
    watch = Watch()
    saver = Saver(watch)
    cfg = TrainConfig(steps=steps, checkpoint_every=every, checkpoint_async=is_async)
    session = session_of(cfg, saver, watch)
    for step in range(1, steps + 1):
        end(session, step)
    assert saver.kept == kept


def test_a_run_that_stops_keeps_no_memory() -> None:
    watch = Watch()
    saver = Saver(watch)
    end(session_of(TrainConfig(steps=9, checkpoint_every=2), saver, watch, stops=True), 3)
    assert (saver.copied, saver.kept) == ([False], [False])


@pytest.mark.parametrize("is_async", [True, False])
def test_a_stopped_run_needs_its_checkpoint(is_async: bool) -> None:
    """Else the run would say that it can be resumed from a checkpoint that does not exist."""
    watch = Watch()
    cfg = TrainConfig(steps=9, checkpoint_every=5, checkpoint_async=is_async)
    session = session_of(cfg, Saver(watch, "No space left on device"), watch, stops=True)
    assert end(session, 2) is True
    with pytest.raises(TrainingError, match="the checkpoint of step 2 could not be written: No space left"):
        session.finish()


@pytest.mark.parametrize(("bad", "refusals"), [((0, 0), [""]), ((2, 0), ["its loss was not finite at step 2"])])
def test_a_loss_that_only_one_worker_knows_of_spoils_the_checkpoint(bad: tuple[int, int], refusals: list[str]) -> None:
    """In fp16 the others take its gradients for an overflow: the steps since then are lost, and nobody would know."""
    watch = Watch()
    saver = Saver(watch)
    assert end(session_of(TrainConfig(steps=9, checkpoint_every=3), saver, watch, bad=bad), 3) is False
    assert saver.refusals == refusals


@pytest.mark.parametrize("stops", [False, True])
def test_gradients_that_are_not_finite_are_known_to_all_and_no_checkpoint_begins(stops: bool) -> None:
    watch = Watch()
    saver = Saver(watch)
    session = session_of(TrainConfig(steps=9, checkpoint_every=3), saver, watch, stops=stops, bad=(2, 2))
    with pytest.raises(TrainingError, match="nothing good to save") if stops else nullcontext():
        end(session, 3)
    assert saver.saved == []
