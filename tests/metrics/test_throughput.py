"""Figures against numbers counted by hand."""

from __future__ import annotations

import pytest
import torch

from ortlaunch.metrics.throughput import Steady, StepClock, Window, percentile, window_metrics
from tests.support.fake_time import FakeTime


def test_a_step_clock_gives_the_time_of_each_step_since_it_was_read() -> None:
    time = FakeTime()
    clock = StepClock(torch.device("cpu"), now=time)
    for seconds in (2.0, 0.5):
        time.seconds += seconds
        clock.step_done()
    assert clock.read() == [2.0, 0.5]
    time.seconds += 1.0
    clock.step_done()
    assert clock.read() == [1.0]
    assert clock.read() == []


def test_a_pause_between_two_readings_belongs_to_no_step_and_keeps_the_steps_before_it() -> None:
    time = FakeTime()
    clock = StepClock(torch.device("cpu"), now=time)
    time.seconds += 2.0
    clock.step_done()
    time.seconds += 50.0
    clock.restart()
    time.seconds += 3.0
    clock.step_done()
    assert clock.read() == [2.0, 3.0]


def test_time_between_restart_and_the_step_before_belongs_to_no_step() -> None:
    time = FakeTime()
    clock = StepClock(torch.device("cpu"), now=time)
    time.seconds += 50.0
    clock.restart()
    time.seconds += 3.0
    clock.step_done()
    assert clock.read() == [3.0]


def test_a_window_is_divided_by_the_steps_really_in_it() -> None:
    # 3 steps of 4 samples x 10 tokens on each of 2 workers, in 6 seconds; 1.5 of them without data.
    window = Window(steps=3, samples=12, tokens=120, data_wait_seconds=1.5)
    metrics = window_metrics(window, [1.0, 2.0, 3.0], world_size=2, flops_per_sample=5e12, peak_flops=100e12)
    assert metrics == pytest.approx(
        {
            "throughput/step_seconds": 2.0,
            "throughput/samples_per_second": 4.0,
            "throughput/tokens_per_second": 40.0,
            "throughput/device/tokens_per_second": 20.0,
            "throughput/data_wait_percent": 25.0,
            "throughput/tflops_per_device": 10.0,
            "throughput/mfu_percent": 10.0,
        }
    )


def test_what_is_not_known_is_not_reported() -> None:
    metrics = window_metrics(Window(steps=1, samples=2), [1.0], world_size=1, flops_per_sample=None, peak_flops=1e12)
    assert set(metrics) == {
        "throughput/step_seconds",
        "throughput/samples_per_second",
        "throughput/data_wait_percent",
    }
    assert window_metrics(Window(), [], world_size=1, flops_per_sample=None, peak_flops=None) == {}


def test_the_summary_takes_the_median_step() -> None:
    steady = Steady()
    steady.add(Window(steps=2, samples=8, tokens=80), [1.0, 9.0])
    steady.add(Window(steps=1, samples=4, tokens=40), [2.0])
    summary = steady.summary(world_size=2)
    # Steps of 1, 2 and 9 seconds: the median is 2; 40 tokens a step on each of 2 workers.
    assert summary["summary/step_seconds_p50"] == 2.0
    assert summary["summary/tokens_per_second_median"] == pytest.approx(40.0)
    assert summary["summary/samples_per_second_median"] == pytest.approx(4.0)
    assert summary["summary/steady_steps"] == 3.0
    assert summary["summary/steady_windows"] == 2.0
    assert Steady().summary(2) == {}


@pytest.mark.parametrize(("percent", "value"), [(0, 1.0), (50, 3.0), (95, 4.8), (100, 5.0)])
def test_percentiles_are_interpolated(percent: float, value: float) -> None:
    assert percentile([5.0, 1.0, 3.0, 2.0, 4.0], percent) == pytest.approx(value)
