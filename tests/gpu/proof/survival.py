"""A run that goes on from a checkpoint and one whose worker was killed: both compute what an undisturbed run does."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from tests.gpu.proof.budget import OutOfTime
from tests.gpu.proof.numbers import SMALL, STEPS, furthest
from tests.gpu.proof.proof import LONGEST_RUN, Check, Ended, Failed, Proof, Training, end_with_children, run_dir_in
from tests.gpu.proof.report import Row
from tests.support.runs import journal

_EVERY = 5
KEPT = (
    *SMALL,
    "trainer=ddp",
    f"train.checkpoint_every={_EVERY}",
    "train.keep_checkpoints=4",
    "train.deterministic=true",
)
_KILL_AT = 8
SLOW = "model.imports=[tests.gpu.slow_steps]"
"""Steps that take a fifth of a second at least, so that the kill comes before the run's end on any machine."""


def rows(proof: Proof) -> Iterator[Row]:
    """Resume from a checkpoint; kill -9 and resume."""
    checks = [
        Check("go on from a checkpoint", f"steps 11 to {STEPS} to the bit", lambda: _from_checkpoint(proof)),
        Check(
            "kill -9 of the first worker at a step, then ortlaunch resume",
            f"exit code 1, then 0; steps 1 to {STEPS} to the bit",
            lambda: _killed(proof),
        ),
    ]
    yield from proof.judge(checks, together=True)


def _from_checkpoint(proof: Proof) -> str:
    # Two runs, of which the second would otherwise wait until all other rows' have begun.
    with proof.place():
        whole = proof.train(*KEPT)
        middle = whole.run_dir / "checkpoints" / "step-00000010"
        if not middle.is_dir():
            raise Failed(f"no {middle.name} among {sorted(path.name for path in middle.parent.iterdir())}")
        rest = proof.train(*KEPT, f"train.resume={middle}")
    return furthest(rest.losses, {step: loss for step, loss in whole.losses.items() if step > 10}, near=0)


def _killed(proof: Proof) -> str:
    folder = proof.new_folder()
    with proof.place():
        step = _kill(proof, folder)
        resumed = proof.command(["-m", "ortlaunch", "resume", str(run_dir_in(folder))], folder)
    if resumed.code:
        raise Failed(f"resume: {resumed.tail}")
    mine, whole = Training(folder).losses, proof.train(*KEPT).losses
    return f"killed after step {step}, exit code 1; resumed: " + furthest(mine, whole, near=0)


def _kill(proof: Proof, folder: Path) -> int:
    """Kills the first worker of a run, which has to end it with exit code 1; returns the last step before."""
    proof.budget.take(LONGEST_RUN, 20)
    started = proof.start(["-m", "ortlaunch", *proof.keys(), *KEPT, SLOW], folder)
    try:
        step = reach(proof, started, folder, _KILL_AT)
        _worker(run_dir_in(folder), 0).send_signal(signal.SIGKILL)
        ended = end_of(proof, started)
    finally:
        end_with_children(started.pid)
    if ended.code != 1:
        raise Failed(f"after the kill: {ended.tail}")
    return step


def reach(proof: Proof, started: subprocess.Popen[str], folder: Path, step: int) -> int:
    """Waits until a run has a step in its journal.

    Returns:
        The last step that is there.

    Raises:
        Failed: the run ended before, or hangs.
        OutOfTime: the section's time was over first.
    """
    seconds = proof.budget.take(LONGEST_RUN)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended = started.poll() is not None
        for run_dir in folder.glob("runs/*/*"):
            seen = max((event.get("step", 0) for event in journal(run_dir)), default=0)
            if seen >= step:
                return seen
        if ended:
            raise Failed(f"it ended before step {step}: {end_of(proof, started).tail}")
        time.sleep(0.05)
    raise _too_long(seconds, f"step {step}")


def end_of(proof: Proof, started: subprocess.Popen[str]) -> Ended:
    """Waits for the end of a run whose worker was killed.

    Raises:
        Failed: it hangs.
        OutOfTime: the section's time was over first.
    """
    seconds = proof.budget.take(LONGEST_RUN)
    try:
        output, _ = started.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise _too_long(seconds, "the end") from None
    return Ended(started.returncode, output)


def _too_long(seconds: float, what: str) -> Exception:
    if seconds < LONGEST_RUN:
        return OutOfTime(f"the section's time was over before {what}, after {seconds:.0f} s")
    return Failed(f"{what} was not reached in {seconds:.0f} s")


def _worker(run_dir: Path, rank: int) -> psutil.Process:
    """The worker process of a rank."""
    for process in psutil.process_iter(["cmdline"]):
        if "ortlaunch.worker" in (process.info["cmdline"] or []) and str(run_dir) in process.info["cmdline"]:
            with suppress(psutil.Error):
                if process.environ().get("RANK") == str(rank):
                    return process
    raise Failed(f"no worker process of rank {rank}")
