"""Garbage is collected at fixed steps and not between."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from ortlaunch.trainer.garbage import collected_every, left_out


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.me = self


def make_garbage() -> weakref.ref[Cycle]:
    reference = weakref.ref(Cycle())
    # Enough young objects to set off an automatic collection.
    _ = [[] for _ in range(20_000)]
    return reference


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_imports_are_left_out_of_collections() -> None:
    with left_out():
        garbage, modules = make_garbage(), [object() for _ in range(10)]
        assert garbage() is not None and not gc.isenabled()
    assert gc.isenabled()
    assert not any(one is modules for one in gc.get_objects()), "a collection goes over it"
    assert make_garbage()() is None, "later garbage is collected"


@pytest.mark.usefixtures("nothing_frozen")
def test_collections_that_were_off_stay_off() -> None:
    gc.disable()
    try:
        with pytest.raises(ImportError), left_out():
            raise ImportError
        assert not gc.isenabled()
    finally:
        gc.enable()


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
