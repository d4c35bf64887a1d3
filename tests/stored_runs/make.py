"""Makes runs.tar.xz: runs of every kind as one version of ortlaunch leaves them, for tests of the versions after it.

    python -m tests.stored_runs.make [COMMIT]

The runs are those of `make`, with a model of some hundred parameters; it takes some minutes and no network.
"""

from __future__ import annotations

import argparse
import io
import json
import platform
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.support.runs import journal
from tests.support.stored import ARCHIVE, PLACE, REPOSITORY, Stored

COMMIT = "b4b90ce"
"""The last one before modules and records were rearranged."""
SECONDS = 240
"""Longest wait for a run."""

NETS = """\
import os
import time

from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 10))

    def forward(self, pixel_values):
        if pause := os.environ.get("NETS_PAUSE"):
            time.sleep(float(pause))
        return self.layers(pixel_values)


class Failing(Net):
    calls = 0

    def forward(self, pixel_values):
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("the third batch is too much")
        return super().forward(pixel_values)
"""

SAME = ("model=factory", "model.target=nets:Net", "data=digits", "device=cpu", "train.log_every=1", "train.steps=6")
SAME += ("train.checkpoint_every=4", "launcher.workers_per_node=2")
EAGER = ("backend=eager",)
ALONE = ("trainer=single", "launcher.workers_per_node=1")
# Each writes and reads checkpoints in a way of its own.
KINDS = {
    "ddp": (*EAGER, "train.eval_every=2", "train.eval_samples=8"),
    "ddp-ort": ("backend=ort",),
    **{f"zero{stage}": (*EAGER, "trainer=deepspeed", f"trainer.zero_stage={stage}") for stage in range(4)},
}
RATES = ("optimizer.lr=0.001,0.01",)
# The versions on the nodes would have to be those of this machine.
JOB = (*SAME, *EAGER, *ALONE, "launcher=slurm", "launcher.preflight=false", "experiment=cluster")


class Maker:
    """Starts the commands of one version."""

    def __init__(self, stored: Stored) -> None:
        self._stored = stored

    def start(self, *words: str, **variables: str) -> subprocess.Popen[bytes]:
        """``ortlaunch WORDS...``"""
        print("ortlaunch", *words, flush=True)
        return subprocess.Popen(
            [self._stored.folder / "venv" / "bin" / "python", "-m", "ortlaunch", *words],
            cwd=self._stored.work,
            env=self._stored.environment | variables,
            start_new_session=True,
        )

    def __call__(self, *words: str, code: int = 0, **variables: str) -> None:
        """The same, to its end."""
        ended(self.start(*words, **variables), code)


def ended(process: subprocess.Popen[bytes], code: int) -> None:
    """Waits for a command, which must end with this code."""
    assert process.wait(SECONDS) == code, process.args


def wait(what: Callable[[], object]) -> None:
    """Until something is so."""
    deadline = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def steps(stored: Stored, name: str) -> int:
    """How many steps a run has made, which may not have a folder yet."""
    events = [event for run_dir in stored.runs(name) for event in journal(run_dir)]
    return sum("train/loss" in event.get("values", {}) for event in events)


def make(stored: Stored) -> None:
    """All runs, one after the other."""
    ortlaunch = Maker(stored)
    for name, words in KINDS.items():
        ortlaunch(*SAME, *words, f"name={name}", "experiment=kinds")
    # In two attempts.
    ortlaunch(*SAME, *EAGER, *ALONE, "name=single", "experiment=kinds", "train.steps=4")
    ortlaunch("resume", "single", "train.steps=6")
    ortlaunch("--multirun", *SAME, *EAGER, *ALONE, *RATES, "experiment=sweeps")
    ortlaunch("bench", *SAME, *EAGER, *ALONE, *RATES, "repeat=2", "experiment=bench")

    words = (*SAME, *EAGER, *ALONE, "experiment=broken")
    ortlaunch(*words, "name=failed", "model.target=nets:Failing", code=1)
    # The address answers with a refusal.
    away = ("tracking.uri=http://127.0.0.1:9", "tracking.timeout_seconds=1", "tracking.flush_seconds=1")
    ortlaunch(*words, "name=undelivered", *away)
    # As `ddp`, but for the pauses in which it is stopped.
    process = ortlaunch.start(*SAME, *KINDS["ddp"], "name=stopped", "experiment=broken", NETS_PAUSE="1")
    wait(lambda: steps(stored, "stopped") >= 2)
    process.terminate()
    ended(process, 128 + signal.SIGTERM)
    kill(stored, ortlaunch.start(*words, "name=killed", "train.steps=1000", NETS_PAUSE="0.2"))

    ortlaunch(*JOB, "name=queued", STAND_IN_JOB="101")
    ortlaunch(*JOB, "name=job", STAND_IN_JOB="102")
    ended(stored.start_job(stored.run("job"), 102), 0)
    ortlaunch(*JOB, "name=requeued", STAND_IN_JOB="103")
    process = stored.start_job(stored.run("requeued"), 103, NETS_PAUSE="1")
    wait(lambda: steps(stored, "requeued") >= 2)
    # SLURM's warning before the time limit.
    process.send_signal(signal.SIGUSR2)
    ended(process, 0)
    ortlaunch("--multirun", *JOB, *RATES, "name=task", STAND_IN_JOB="104")

    # Which notes what it has read.
    ortlaunch("jobs", "--all")


def kill(stored: Stored, process: subprocess.Popen[bytes]) -> None:
    """Kills all processes of a run that has a checkpoint, and of which MLflow has some steps and lacks others."""
    wait(lambda: any((run_dir / "checkpoints" / "latest").exists() for run_dir in stored.runs("killed")))
    run_dir = stored.run("killed")
    begun = (run_dir / "journal.jsonl").stat().st_size

    def sent() -> int:
        return int(json.loads((run_dir / "relay.json").read_text())["offset"])

    wait(lambda: sent() > begun)
    wait(lambda: (run_dir / "journal.jsonl").stat().st_size > sent())
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for worker in workers:
        worker.kill()
    process.wait()
    assert begun < sent() < (run_dir / "journal.jsonl").stat().st_size


def neutral(stored: Stored) -> None:
    """Takes out what is this machine's own."""
    for own in (str(REPOSITORY), str(Path(sys.prefix).parent)):
        stored.rename(own, "/".ljust(len(own), "x"))
    stored.rename(platform.release(), "6.1.0-".ljust(len(platform.release()), "x"))
    stored.rename(str(stored.folder), PLACE)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Make the archive of stored runs.")
    parser.add_argument("commit", nargs="?", default=COMMIT, help=f"whose ortlaunch makes them (default: {COMMIT})")
    commit = parser.parse_args().commit
    with tempfile.TemporaryDirectory() as parent:
        stored = Stored(Path(parent))
        stored.work.mkdir(parents=True)
        (stored.work / "nets.py").write_text(NETS)
        (stored.folder / "venv").symlink_to(sys.prefix)
        stored.cache.mkdir()
        # Compiled extensions, which take minutes to make.
        for built in (Path.home() / ".cache" / "ortlaunch").glob("cpython-*"):
            (stored.cache / built.name).symlink_to(built)
        tree = subprocess.run(["git", "-C", REPOSITORY, "archive", commit], stdout=subprocess.PIPE, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(tree)) as archive:
            archive.extractall(stored.folder / "tree", filter="data")
        stored.write_stand_ins()
        make(stored)
        neutral(stored)
        with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
            for folder in (stored.work, stored.cache):
                archive.add(folder, folder.name, filter=_kept)
    print(f"{ARCHIVE}: {ARCHIVE.stat().st_size / 1e6:.2f} MB")


def _kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """What the test needs: no compiled extension, and no exported graphs, which belong to one version anyway."""
    name = Path(member.name).name
    if name == "__pycache__" or name == "exports" or name.startswith("cpython-"):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    main()
