"""Garbage is collected at fixed steps and not between."""

from __future__ import annotations

import gc
import weakref

import pytest

from ortlaunch.trainer.garbage import collected_every


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.me = self


def make_garbage() -> weakref.ref[Cycle]:
    reference = weakref.ref(Cycle())
    # Enough young objects to set off an automatic collection.
    _ = [[] for _ in range(20_000)]
    return reference


def test_cycles_live_until_the_step_that_collects() -> None:
    with collected_every(3) as step_done:
        step_done(1)
        assert gc.get_freeze_count() > 0, "what is there by then is set aside"
        garbage = make_garbage()
        step_done(2)
        assert garbage() is not None
        step_done(3)
        assert garbage() is None
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_zero_leaves_it_to_python() -> None:
    with collected_every(0) as step_done:
        step_done(1)
        assert gc.isenabled()
        assert make_garbage()() is None


def test_an_error_within_switches_it_on_again() -> None:
    with pytest.raises(ValueError), collected_every(3):
        raise ValueError
    assert gc.isenabled()
