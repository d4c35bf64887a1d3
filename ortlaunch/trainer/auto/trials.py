"""Trials of other backends while a run pauses: each worker starts a process that trains a few steps of its own.

The workers' trial processes find each other as the workers do, so that a trial has the load and the communication of
the run. A trial that fails, hangs or is killed leaves the run as it is.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ortlaunch.base.programs import module_command
from ortlaunch.base.reading import read_json
from ortlaunch.run.run import Run
from ortlaunch.trainer.auto.decision import Rate
from ortlaunch.trainer.auto.lives import life
from ortlaunch.trainer.auto.selection import Selection
from ortlaunch.trainer.workers import STORE

STARTED = "ORTLAUNCH_TRIAL_STARTED"
_POLL_SECONDS = 0.05
_STOPPED = "stopped"
_LATE = "late"


def result_file(run: Run, backend: str, rank: int) -> Path:
    """The file that the trial process of a worker writes."""
    return run.trials / f"{backend}-rank-{rank}.json"


def tried(selection: Selection, run: Run, backend: str, seconds: float, is_stopped: Callable[[], bool]) -> Rate | None:
    """Tries a backend; all workers call it.

    Args:
        selection: the run's choice.
        run: the run.
        backend: the backend to try.
        seconds: how long the trial may take.
        is_stopped: whether this worker was asked to stop the run.

    Returns:
        The result, on the first worker; None where the run was asked to stop, and on the others.
    """
    begun = time.monotonic()
    outcome = _outcome(selection, run, backend, seconds, is_stopped)
    key = f"trial-{backend}/{life()}"
    selection.store.set(f"{key}/{selection.rank}", outcome)
    if selection.rank != 0:
        return None
    outcomes = [selection.store.get(f"{key}/{rank}").decode() for rank in range(int(os.environ["WORLD_SIZE"]))]
    if _STOPPED in outcomes:
        return None
    # The first to fail has the reason; the trials of the others were ended for it.
    failures = [one for one in outcomes if one]
    if failures:
        reasons = [one for one in failures if one.startswith("unfit: ")]
        if reasons:
            return Rate(unfit=reasons[0].removeprefix("unfit: "))
        return Rate(tried_seconds=time.monotonic() - begun)
    found = read_json(result_file(run, backend, 0)) or {}
    return Rate(step_seconds=float(found["step_seconds"]), start_seconds=float(found["start_seconds"]))


def _outcome(selection: Selection, run: Run, backend: str, seconds: float, is_stopped: Callable[[], bool]) -> str:
    """How the trial of this worker ended: empty for a result, `_LATE`, `_STOPPED`, or ``unfit: REASON``."""
    ended = f"trial-ended-{backend}/{life()}"
    until = time.monotonic() + seconds
    try:
        process = _started(selection, run, backend)
    except OSError:
        # A full disk, or a limit of processes. The run goes on as after any trial that fails.
        selection.store.set(ended, "1")
        return _LATE
    outcome = ""
    try:
        while process.poll() is None:
            if is_stopped():
                outcome = _STOPPED
            elif time.monotonic() > until or selection.store.check([ended]):
                outcome = _LATE
            if outcome:
                break
            time.sleep(_POLL_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if not outcome:
        found = read_json(result_file(run, backend, selection.rank)) or {}
        if "unfit" in found:
            outcome = f"unfit: {found['unfit']}"
        elif process.returncode != 0 or "step_seconds" not in found:
            outcome = _LATE
    if outcome:
        selection.store.set(ended, "1")
    return outcome


def _started(selection: Selection, run: Run, backend: str) -> subprocess.Popen[bytes]:
    run.trials.mkdir(exist_ok=True)
    result_file(run, backend, selection.rank).unlink(missing_ok=True)
    variables = {
        **selection.environment,
        STORE: f"/trial-{backend}-{life()}",
        STARTED: str(time.time()),
    }
    with (run.trials / f"{backend}-rank-{selection.rank}.log").open("wb") as log:
        return subprocess.Popen(
            [*module_command("ortlaunch.trainer.auto.trial"), str(run.path), backend],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
