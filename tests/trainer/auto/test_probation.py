"""The first steps of a run whose backend is not decided."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest
import torch

from ortlaunch.config.schema import TrainConfig
from ortlaunch.trainer.auto.decision import Choice, Plan, Rate
from ortlaunch.trainer.auto.probation import Probation


@pytest.mark.parametrize(
    ("life", "attempt", "start_step", "start"),
    [("0", 0, 0, 70.0), ("1", 0, 0, None), ("0", 1, 0, None), ("0", 0, 8, None)],
    ids=["first", "second life", "second attempt", "from a checkpoint"],
)
def test_a_start_that_holds_more_than_a_start_is_not_kept(monkeypatch, life, attempt, start_step, start):
    """After ORT was given up at its start, eager's time from the launch to the first step holds that of ORT."""
    monkeypatch.setenv("ORTLAUNCH_LIFE", life)
    noted = []
    rates = SimpleNamespace(note=lambda backend, rate, busy_percent: noted.append((backend, rate)))
    context = SimpleNamespace(
        config=SimpleNamespace(train=TrainConfig()),
        workers=SimpleNamespace(is_first=True),
        watch=SimpleNamespace(paused=contextlib.nullcontext),
        attempt=attempt,
    )
    selection = SimpleNamespace(backend="eager", known=dict, rates=rates)
    probation = Probation(selection, context, start_step, is_stopped=lambda: False, close=lambda: None)
    probation._seconds, probation._start_seconds = [0.1], 70.0
    assert probation._tried(Plan(), 5)
    assert noted == [("eager", Rate(0.1, start))]


@pytest.mark.parametrize("is_asked", [False, True], ids=["goes on", "asked to stop"])
def test_a_run_that_a_worker_was_asked_to_stop_does_not_begin_again(is_asked):
    """A signal is known to the program that got it alone."""
    done = []
    faster = Choice("ort", "measured", is_final=True)
    workers = SimpleNamespace(gather=lambda own: torch.tensor([own, [float(is_asked)]]))
    context = SimpleNamespace(config=SimpleNamespace(train=TrainConfig()), workers=workers, journal=None)
    selection = SimpleNamespace(
        backend="eager",
        told=lambda name, value: dataclasses.asdict(faster),
        settle=lambda choice, journal: done.append(choice.backend),
        change=lambda choice: done.append(f"change to {choice.backend}"),
    )
    Probation(selection, context, 0, is_stopped=lambda: False, close=lambda: None)._conclude(8)
    assert done == (["eager"] if is_asked else ["change to ort"])


@pytest.mark.parametrize(
    ("train", "reason"),
    [
        (TrainConfig(steps=2), "a run of 2 steps leaves none to measure"),
        (TrainConfig(steps=90, checkpoint_every=1), "a checkpoint after 1 step leaves none to measure"),
    ],
    ids=["two steps", "a checkpoint"],
)
def test_a_run_without_a_step_to_measure_says_why(train, reason):
    settled = []
    context = SimpleNamespace(
        config=SimpleNamespace(train=train),
        workers=SimpleNamespace(device=torch.device("cpu")),
        launched=0.0,
        journal=None,
    )
    selection = SimpleNamespace(
        backend="eager", is_decided=False, settle=lambda choice, journal: settled.append(choice.reason)
    )
    probation = Probation(selection, context, 0, is_stopped=lambda: False, close=lambda: None)
    for step in range(1, 3):
        if not settled:
            probation.step_ends(step)
    assert settled == [reason]
