"""Figures about whole runs that only whole runs can show: who holds the others up, and what a death costs."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import time

import psutil
import pytest

from tests.integration.conftest import RUN_SECONDS, journal

SLEEP = 0.05
NETS = f"""
import os, time
from torch import nn

class Sleeps(nn.Module):
    def __init__(self, ranks):
        super().__init__()
        self.out = nn.Linear(64, 10)
        self.seconds = {SLEEP} if int(os.environ["RANK"]) in ranks else 0.0

    def forward(self, pixel_values):
        time.sleep(self.seconds)
        return self.out(pixel_values.flatten(1))
"""
WORDS = ("model=factory", "model.target=netze:Sleeps", "data=digits", "backend=eager", "tracking=none")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "netze.py").write_text(NETS)
    return tmp_path


def steady(result, name):
    """A metric's values in the steady windows."""
    flags, values = result.series("throughput/steady"), result.series(name)
    return [values[step] for step, flag in flags.items() if flag]


def test_the_rank_that_holds_the_others_up_is_named(train, folder):
    """With rank 1 asleep in its forward it is named, and leads by nearly a whole step; all ranks asleep, none does."""
    slowed = train(folder, *WORDS, "model.params.ranks=[1]", "train.steps=40", "train.log_every=5")
    assert slowed.status == "FINISHED", slowed.report
    # In single windows, another process of the machine may have held rank 0 up for longer.
    assert statistics.mode(steady(slowed, "stragglers/slowest_rank")) == 1.0
    lead = statistics.median(steady(slowed, "stragglers/spread_percent"))
    assert 50 < lead <= 101
    assert all(value >= SLEEP for value in steady(slowed, "stragglers/step_seconds_max"))
    assert re.search(r"^warning: rank 1 on \S+ holds the others up: .* \d\d %", slowed.stdout, re.MULTILINE)

    even = train(folder, *WORDS, "model.params.ranks=[0,1]", "train.steps=40", "train.log_every=5")
    assert even.status == "FINISHED", even.report
    assert statistics.median(steady(even, "stragglers/spread_percent")) < min(40, lead / 2)


@pytest.mark.nightly
def test_a_killed_worker_costs_what_the_account_says(start, folder):
    """kill -9 after a checkpoint, torchrun starts the workers again: steps that are taken again are lost."""
    running = start(
        folder,
        *(*WORDS, "model.params.ranks=[0,1]", "train.steps=40", "train.log_every=1", "train.checkpoint_every=10"),
        "launcher.max_restarts=1",
    )
    run_dir = running.wait_for_training()
    deadline = time.monotonic() + RUN_SECONDS
    while not (run_dir / "checkpoints" / "step-00000010" / "manifest.json").exists() or last_step(run_dir) < 15:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(worker_of(run_dir, 1), signal.SIGKILL)
    result = running.finish()
    assert result.returncode == 0, result.report
    (rewind,) = [event for event in result.events if event["event"] == "rewind"]
    values = {name: value for name, step, value in result.points if name.startswith(("goodput/", "summary/goodput"))}
    died = max(event["step"] for event in result.events[: result.events.index(rewind)] if event["event"] == "metrics")
    assert rewind["step"] in range(10, died + 1, 10)
    # Each step takes as long as the sleep at least.
    assert values["goodput/productive_seconds"] >= 40 * SLEEP
    assert values["goodput/lost_seconds"] >= (died - rewind["step"]) * SLEEP
    # Import, rendezvous and building, twice.
    assert values["goodput/startup_seconds"] > 2.0
    assert values["goodput/down_seconds"] > 0.0
    starts = [event["t"] for event in result.events if event["event"] == "start"]
    ends = [event["t"] for event in result.events if event["event"] == "end"]
    assert values["goodput/wall_seconds"] == pytest.approx((ends[0] - starts[0]) / 1000, abs=1.0)
    parts = ("productive", "startup", "evaluation", "checkpoint", "lost", "down", "other")
    assert sum(values[f"goodput/{part}_seconds"] for part in parts) == pytest.approx(
        values["goodput/wall_seconds"], abs=0.5
    )
    percent = 100 * values["goodput/productive_seconds"] / values["goodput/wall_seconds"]
    assert values["summary/goodput_percent"] == pytest.approx(percent)
    assert re.search(r"^goodput: +\d+ % of \d+ s went into steps that count \(.*start-up", result.stdout, re.MULTILINE)


def last_step(run_dir):
    return max((event.get("step", 0) for event in journal(run_dir)), default=0)


def worker_of(run_dir, rank):
    """The process of a rank, by what its watch writes."""
    health = json.loads((run_dir / "health" / f"rank-{rank}.json").read_text())
    assert psutil.pid_exists(health["pid"])
    return health["pid"]
