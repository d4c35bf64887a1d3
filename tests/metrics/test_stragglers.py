"""Which worker the others wait for, against times made by hand."""

from __future__ import annotations

import pytest
import torch

from ortlaunch.metrics.stragglers import OwnTime, Tally, straggler_metrics
from tests.support.fake_time import FakeTime

CPU = torch.device("cpu")


def test_own_time_is_what_lies_between_the_marks() -> None:
    time = FakeTime()
    own = OwnTime(CPU, now=time)
    for seconds in (1.0, 0.5):
        own.begin()
        time.seconds += seconds
        own.end()
        time.seconds += 100.0  # Backward, and waiting for others.
    assert own.read() == 1.5
    assert own.read() == 0.0


def test_an_end_without_a_begin_counts_nothing() -> None:
    time = FakeTime()
    own = OwnTime(CPU, now=time)
    own.end()
    own.begin()
    time.seconds += 1.0
    own.end()
    time.seconds += 1.0
    own.end()
    assert own.read() == 1.0


def test_on_cuda_events_are_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """In milliseconds, and not before somebody asks."""
    clock = FakeTime()
    read: list[float] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock.seconds

        def elapsed_time(self, other: Event) -> float:
            read.append(other.at)
            return 1000.0 * (other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    own = OwnTime(torch.device("cuda"))
    own.begin()
    clock.seconds += 2.0
    own.end()
    assert read == []
    assert own.read() == 2.0
    assert own.read() == 0.0


def test_the_slowest_is_named_with_its_lead_over_the_others() -> None:
    # Steps take 2 s whoever is asked; rank 2 is busy for 1.5 s of it, the others for 0.4, 0.5 and 0.6.
    metrics = straggler_metrics([0.4, 0.5, 1.5, 0.6], [2.0, 2.0, 1.9, 2.0])
    assert metrics == pytest.approx(
        {
            "stragglers/slowest_rank": 2.0,
            "stragglers/step_seconds_max": 2.0,
            "stragglers/spread_percent": 100 * (1.5 - 0.5) / 2.0,
        }
    )


def test_a_worker_alone_is_no_straggler() -> None:
    assert straggler_metrics([1.0], [2.0]) == {}
    assert straggler_metrics([0.0, 0.0], [0.0, 0.0]) == {}


def tally(*windows: tuple[int, float]) -> Tally:
    found = Tally()
    for rank, percent in windows:
        found.add({"stragglers/slowest_rank": float(rank), "stragglers/spread_percent": percent})
    return found


def test_only_one_that_is_always_behind_is_reported() -> None:
    assert tally(*[(1, 40.0)] * 5).straggler() == (1, 40.0)
    assert tally(*[(1, 40.0)] * 4, (0, 40.0)).straggler() == (1, 40.0)
    # Sometimes this one, sometimes another; too little; too few windows.
    assert tally(*[(1, 40.0)] * 3, *[(0, 40.0)] * 2).straggler() is None
    assert tally(*[(1, 10.0)] * 9).straggler() is None
    assert tally(*[(1, 40.0)] * 4).straggler() is None
    assert Tally().straggler() is None
