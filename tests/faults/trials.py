"""A small run with real processes that is disturbed on purpose, and what must hold of it afterwards."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from ortlaunch.run import manifest
from ortlaunch.run.checkpoints import steps_in
from tests.integration.conftest import Result, Started, journal, mentioning

STEPS, EVERY = 60, 5
# Some 12 MB with the optimizer's state: a checkpoint takes long enough to be hit. A step takes some
# 0.05 s on two idle cores, more beside other tests: requests to stop are exchanged once a second.
WORDS = (
    "model=mlp",
    "model.params.hidden_dim=16384",
    "backend=eager",
    "train.batch_size=192",
    f"train.steps={STEPS}",
    "train.log_every=1",
    f"train.checkpoint_every={EVERY}",
    "train.save_weights=false",
    "launcher.grace_seconds=30",
    # Also where the process may run on one core only.
    "launcher.workers_per_node=2",
)
SECONDS = 150
SHARDED = ("trainer=fsdp", "trainer.blocks=Linear")


@dataclass(frozen=True)
class Base:
    """The undisturbed run, and where all runs are made."""

    folder: Path
    losses: dict[int, float]
    seconds: float
    """How long it took, from the command to its end."""


def make_base(folder: Path, *words: str) -> Base:
    """Runs it, with further keys."""
    began = time.monotonic()
    result = Started(folder, (*WORDS, "tracking=none", *words)).finish()
    assert result.returncode == 0, result.report
    assert len(result.losses) == STEPS
    return Base(folder, result.losses, time.monotonic() - began)


class Trial:
    """One run that will be disturbed."""

    def __init__(self, base: Base, seed: int, *words: str) -> None:
        self.base = base
        self.random = random.Random(seed)
        self.running = Started(base.folder, (*WORDS, "tracking=none", *words))
        self._run_dir: Path | None = None

    @property
    def run_dir(self) -> Path:
        """The run folder; waits for its first loss."""
        if self._run_dir is None:
            self._run_dir = self.running.wait_for_training()
        return self._run_dir

    def reach(self, step: int) -> None:
        """Waits until a step is journalled."""
        self.wait_for(lambda: any(event.get("step", 0) >= step for event in journal(self.run_dir)))

    def reach_some_step(self, left: int = 10) -> None:
        """Waits for a step drawn at random that has so many behind it, and a moment within it."""
        self.reach(self.random.randrange(1, STEPS - left))
        time.sleep(self.random.uniform(0, 0.05))

    def reach_writing(self) -> None:
        """Waits until some checkpoint is being written, and a moment into it."""
        self.reach(self.random.randrange(1, STEPS // 2))
        self.wait_for(lambda: any((self.run_dir / "checkpoints").glob("*.partial")), pause=0.0005)
        time.sleep(self.random.uniform(0, 0.03))

    def wait_for(self, condition, pause: float = 0.01) -> None:
        """Waits for a condition; fails when the run ends or some minutes pass before it."""
        _ = self.run_dir  # Which is waited for as long as a start may take.
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline and self.running.process.poll() is None, "too late"
            time.sleep(pause)

    def workers(self) -> list[psutil.Process]:
        """The worker processes, by rank."""
        found = {}
        for process in mentioning(self.run_dir):
            with suppress(psutil.Error):
                rank = process.environ().get("RANK")
                if rank is not None:
                    found[int(rank)] = process
        return [found[rank] for rank in sorted(found)]

    def kill_all(self) -> None:
        """kill -9 of every process of the run, the launcher first."""
        processes = [psutil.Process(self.running.process.pid), *mentioning(self.run_dir)]
        for process in processes:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        self.running.process.wait()
        self.check_gone()

    def complete(self) -> list[str]:
        """Names of the checkpoints that are whole."""
        return [path.name for path in steps_in(self.run_dir / "checkpoints") if not manifest.problems(path)]

    def check_gone(self) -> None:
        """No process is left, after a moment."""
        deadline = time.monotonic() + SECONDS
        while (left := mentioning(self.run_dir)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert left == []

    def resume(self, *words: str) -> Result:
        """`ortlaunch resume`: it ends well, and with `check_same`; nothing that was complete had gone before it."""
        before = self.complete()
        assert len(before) <= 3
        result = Started(self.base.folder, ("resume", str(self.run_dir), *words)).finish()
        assert result.returncode == 0, result.report
        self.check_same()
        if before:
            assert f"going on from {self.run_dir / 'checkpoints' / before[0]}" in result.stdout, result.report
        return result

    def check_same(self) -> None:
        """Every loss that was journalled, in whatever attempt, is that of the undisturbed run, and none is missing."""
        seen = set()
        for event in journal(self.run_dir):
            loss = event.get("values", {}).get("train/loss") if event["event"] == "metrics" else None
            if loss is not None:
                assert loss == self.base.losses[event["step"]], event
                seen.add(event["step"])
        assert seen == self.base.losses.keys()
        assert journal(self.run_dir)[-1] | {"t": 0} == {"event": "end", "t": 0, "status": "FINISHED"}
        newest = f"step-{STEPS:08d}"
        assert self.complete()[0] == newest
        self.check_gone()


def end(trial: Trial) -> None:
    """Ends whatever of a trial is still there."""
    with suppress(OSError):
        os.kill(trial.running.process.pid, signal.SIGKILL)
    if trial._run_dir is not None:
        for process in mentioning(trial._run_dir):
            with suppress(psutil.Error):
                process.kill()
