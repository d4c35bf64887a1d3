"""Run folders as runs leave them, without the runs."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.launch.plan import folder_name
from ortlaunch.run.identity import start_ticks
from ortlaunch.run.journal import Journal

CONFIG = """\
experiment: {experiment}
name: {name}
train:
  batch_size: 4
  steps: {steps}
launcher:
  name: local
  grace_seconds: 120
tracking:
  name: none
"""


@dataclass
class Maker:
    """Makes run folders below one run root."""

    root: Path
    made: int = 0

    def __call__(
        self,
        name: str = "gpt2-ort-ddp",
        *,
        run_id: str | None = None,
        experiment: str = "default",
        steps: int = 100,
        step: int | None = 100,
        end: str | None = "FINISHED",
        launcher: dict[str, Any] | None = None,
        job: dict[str, Any] | None = None,
        attempts: int = 1,
    ) -> Path:
        """A run folder; without `launcher` and `job` its launcher is a process of this machine that is gone."""
        self.made += 1
        run_id = run_id or f"{self.made:06x}"
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(1_790_000_000 + 60 * self.made))
        run_dir = self.root / folder_name(experiment) / f"{stamp}-{folder_name(name)}-{run_id}"
        (run_dir / "logs").mkdir(parents=True)
        (run_dir / "config.yaml").write_text(CONFIG.format(experiment=experiment, name=name, steps=steps))
        gone = {"pid": 2**22 - 1, "host": socket.gethostname(), "start_ticks": 1}
        file, content = ("job.json", job) if job is not None else ("launcher.json", launcher or gone)
        (run_dir / file).write_text(json.dumps(content))
        journal = Journal(run_dir / "journal.jsonl")
        for _ in range(attempts):
            journal.start(experiment, name, run_id)
            journal.params({"train": {"steps": steps}})
        if step is not None:
            values = {"train/loss": 2.5, "throughput/tokens_per_second": 1234.5, "throughput/step_seconds": 0.5}
            journal.metrics(step, values)
        if end is not None:
            journal.end(end)  # type: ignore[arg-type]
        journal.close()
        return run_dir


@pytest.fixture(autouse=True)
def cache_of_this_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the runs of another, or of the user."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def make_run(tmp_path: Path) -> Maker:
    return Maker(tmp_path / "runs")


@pytest.fixture
def squeue_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster whose controller does not answer."""
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text("#!/bin/sh\necho squeue: Unable to contact the controller >&2\nexit 1\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}:/usr/bin:/bin")


@pytest.fixture
def alive() -> dict[str, Any]:
    """A launcher.json of a process that lives: this one."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "start_ticks": start_ticks(os.getpid())}
