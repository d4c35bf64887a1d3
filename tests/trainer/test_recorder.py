"""What the recorder journals of a single worker, with facts about its machine from the test."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ortlaunch.config.schema import TrainConfig
from ortlaunch.metrics.gpu import FIELDS as GPU_FIELDS
from ortlaunch.metrics.nodes import Nodes, WorkerLocation
from ortlaunch.metrics.system import NODE_FIELDS
from ortlaunch.tracking.journal import Journal, read_events
from ortlaunch.trainer.mean import Mean
from ortlaunch.trainer.recorder import Recorder
from ortlaunch.trainer.workers import Workers

ENGINE: Any = SimpleNamespace(guard=SimpleNamespace(read=lambda: (0, 0)), loss_scale=None)


class Sampler:
    """Says what the test wants, and remembers what it was told."""

    def __init__(self, other: float, throttled: bool | None) -> None:
        self.throttled = throttled
        self.windows: list[tuple[bool, bool]] = []
        self._other = other

    def window(self, *, steady: bool, now: bool) -> list[float]:
        self.windows.append((steady, now))
        return [50.0] + [float("nan")] * (len(NODE_FIELDS) - 1 + len(GPU_FIELDS))

    def other_seconds(self) -> tuple[float, float]:
        return self._other, 100.0


def recorder_of(journal: Journal, sampler: Sampler, *, start_step: int = 0) -> Recorder:
    system: Any = SimpleNamespace(nodes=Nodes([WorkerLocation(0, "node7")]), sampler=sampler)
    return Recorder(
        TrainConfig(steps=10, log_every=1, steady_after=3),
        Workers(0, 1, torch.device("cpu"), threads=1),
        journal,
        system,
        is_ort_active=lambda: False,
        flops_per_sample=None,
        peak_flops=None,
        start_step=start_step,
    )


def recorded(tmp_path: Path, sampler: Sampler, *, disturbed: int = 0) -> list[dict[str, Any]]:
    """The journal of ten steps, logged at each; one of them looked into by a profiler."""
    journal = Journal(tmp_path / "journal.jsonl")
    recorder = recorder_of(journal, sampler)
    for step in range(1, 11):
        recorder.micro_batch({"input_ids": torch.zeros(2, 8, dtype=torch.long)}, 2)
        recorder.step_done()
        if step == disturbed:
            recorder.disturbed()
        recorder.log(step, Mean(1, torch.device("cpu")), None, 0.1, ENGINE)
    recorder.finish(10)
    return read_events(journal.path, 0)[0]


def series(events: list[dict[str, Any]], name: str) -> dict[int, float]:
    return {event["step"]: event["values"][name] for event in events if name in event.get("values", {})}


def test_every_window_says_whether_it_is_steady(tmp_path: Path) -> None:
    sampler = Sampler(1.0, None)
    events = recorded(tmp_path, sampler, disturbed=6)
    flags = [0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert list(series(events, "throughput/steady").values()) == flags
    assert series(events, "summary/steady_windows") == {10: 6.0}
    # The last window's sample is taken at once: no other one would come.
    assert sampler.windows == [(flag == 1.0, step == 10) for step, flag in enumerate(flags, 1)]
    assert series(events, "system/node7/cpu_utilization_percentage")[5] == 50.0
    assert not series(events, "stragglers/slowest_rank")


@pytest.mark.parametrize(("other", "warns"), [(4.0, False), (37.4, True)])
def test_a_machine_with_other_work_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: float, warns: bool
) -> None:
    events = recorded(tmp_path, Sampler(other, None))
    assert series(events, "summary/other_cpu_percent") == {10: other}
    text = "warning: this machine was busy with other work: 37 % of its cores; figures may not repeat\n"
    assert capsys.readouterr().out == (text if warns else "")


@pytest.mark.parametrize(("throttled", "tag"), [(None, None), (False, "false"), (True, "true")])
def test_clocks_that_were_held_down_are_a_tag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], throttled: bool | None, tag: str | None
) -> None:
    events = recorded(tmp_path, Sampler(0.0, throttled))
    found = [event["values"].get("ortlaunch.throttled") for event in events if event["event"] == "tags"]
    assert found[-1] == tag
    assert ("held GPUs down (rank 0 on node7)" in capsys.readouterr().out) is bool(throttled)


def test_every_attempts_start_has_a_step_of_its_own(tmp_path: Path) -> None:
    """MLflow takes one value of a step, and compare breaks its lines where a later attempt began."""
    journal = Journal(tmp_path / "journal.jsonl")
    for start_step in (0, 7):
        recorder_of(journal, Sampler(1.0, None), start_step=start_step).startup({"startup/import_seconds": 2.0})
    assert series(read_events(journal.path, 0)[0], "startup/import_seconds") == {0: 2.0, 7: 2.0}
