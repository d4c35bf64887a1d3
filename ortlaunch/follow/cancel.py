"""`ortlaunch cancel RUN`: ends runs, with a checkpoint unless ``--now`` is given, and prints how they ended."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ortlaunch.base import exit_codes
from ortlaunch.base.arguments import Parser, seconds
from ortlaunch.base.errors import RequestError
from ortlaunch.base.programs import module_command
from ortlaunch.base.text import say
from ortlaunch.config.schema import LauncherConfig
from ortlaunch.follow.find import HELP, find_runs
from ortlaunch.follow.rows import Row
from ortlaunch.follow.state import State
from ortlaunch.follow.status import Look, look
from ortlaunch.launch.table import queue_named
from ortlaunch.run.ending import end_run
from ortlaunch.run.folders import RunFolder
from ortlaunch.run.identity import Process, has_open, is_own
from ortlaunch.run.record import Record, read_record
from ortlaunch.run.run import Run
from ortlaunch.run.state import SCRIPT_TAG
from ortlaunch.tracking.destination import has_trackers

_POLL_SECONDS = 0.3
_QUEUE_POLL_SECONDS = 1.5
_LEAVING_SECONDS = 75.0
"""Time after the grace period in which an ending run sends its record to MLflow."""
_SYNC_SECONDS = 60.0
_WAITING_STATES = (State.QUEUED, State.PENDING, State.REQUEUED, State.PREEMPTED)


def cancel(arguments: list[str]) -> int:
    """Runs `ortlaunch cancel`.

    Args:
        arguments: the command line after the verb.

    Returns:
        0 if no run goes on any more, 1 if one still does.

    Raises:
        RequestError: no run or several match, or the run cannot be reached from here.
    """
    options = _parser().parse_args(arguments)
    folders = [folder for asked in options.run for folder in find_runs(asked)]
    for folder in folders:
        Run(folder.path).require_own("cancel")
    looked = [look(folder) for folder in folders]
    for row in (one.row for one in looked):
        if row.is_over:
            say(f"{_described(row)} is over already: {_state_text(row)}")
    active = [(one.row, one.record) for one in looked if not one.row.is_over]
    for _, record in active:
        _check_readable(record)
    # Waiting jobs are cancelled first, so that none of them starts on the nodes that the others leave.
    _cancel_jobs([row for row, _ in active if row.job_id and row.state in _WAITING_STATES])
    end_checks = [_ask_to_end(row, record, now=options.now) for row, record in active]
    asked_at = time.monotonic()
    all_ended, unsent = True, list[Path]()
    for (row, record), check_end in zip(active, end_checks, strict=True):
        seconds = options.wait if options.wait is not None else _grace_seconds(record.folder.path) + _LEAVING_SECONDS
        has_ended = _wait_until(check_end, asked_at + seconds, _QUEUE_POLL_SECONDS if row.job_id else _POLL_SECONDS)
        if has_ended and row.job_id:
            unsent += _journal_missing_end(record.folder)
        say(_outcome_text(look(record.folder).row, has_ended=has_ended))
        all_ended &= has_ended
    _send(unsent)
    return exit_codes.DONE if all_ended else exit_codes.FAILED


def _ask_to_end(row: Row, record: Record, *, now: bool) -> Callable[[], bool]:
    """Asks a run to end, or ends it; returns a function that tells whether it has ended."""
    return _end_job(row, record, now) if row.job_id else _end_here(record, now)


def _end_here(record: Record, now: bool) -> Callable[[], bool]:
    """Ends a run that was started without a scheduler, on this machine or another."""
    launcher = record.launcher
    if launcher is None or not launcher.is_here:
        if now:
            host = launcher.host if launcher is not None else "another machine"
            raise RequestError(f"{record.run_id} runs on {host}: cancel it there to end it at once")
        _ask_to_stop(record.folder.path)
        return lambda: look(record.folder).row.is_over
    _check_launcher(launcher, record)
    _ask_to_stop(record.folder.path)
    # The launcher acts as on Ctrl-C: it ends workers that have made no step yet at once, and the others after the
    # grace period at the latest.
    _signal(launcher)
    if now:
        time.sleep(1.0)
        _signal(launcher)
    return lambda: not launcher.lives


def _end_job(row: Row, record: Record, now: bool) -> Callable[[], bool]:
    """Ends a run that is a job of a scheduler."""
    if row.state not in _WAITING_STATES:
        # The request is written even if the job is cancelled next: its first process then starts no workers again.
        _ask_to_stop(record.folder.path)
        # Nobody knows the steps of a script, which may have something to save.
        if now or (record.step is None and SCRIPT_TAG not in record.tags):
            _cancel_jobs([row])
    return lambda: _has_ended(look(record.folder))


def _has_ended(job: Look) -> bool:
    """Returns whether a job has ended. A scheduler that could not be asked does not show that it has."""
    if job.row.is_over:
        return True
    # SLURM at once forgets a task of an array that is cancelled before it began.
    is_forgotten = job.row.state in (State.KILLED, State.UNKNOWN)
    return is_forgotten and not job.problem


def _journal_missing_end(folder: RunFolder) -> list[Path]:
    """Journals the end of a run whose job could not journal it; returns the folders to send."""
    if read_record(folder).ended is not None:
        return []
    run = Run(folder.path)
    end = run.lost_end()
    with run.journal() as journal:
        ended_sweep = end_run(run, journal, end, is_job=True).sweep
    if not has_trackers(folder.path):
        return []
    return [folder.path, *([ended_sweep] if ended_sweep is not None else [])]


def _ask_to_stop(run_dir: Path) -> None:
    try:
        Run(run_dir).ask_to_stop("cancel")
    except OSError as error:
        raise RequestError(f"the run cannot be asked to stop: {error}") from error


def _check_readable(record: Record) -> None:
    """Refuses a run of which a damaged file should say what process or job it is.

    Raises:
        RequestError: the message names the file.
    """
    decisive = (record.run.launcher_file, record.run.job_file)
    for damage in record.damage:
        if damage.path in decisive:
            raise RequestError(f"cancel: {damage}: nothing was done")


def _check_launcher(launcher: Process, record: Record) -> None:
    """Refuses to signal a process that is not the launcher of this run, though the run's folder says so.

    A launcher keeps the journal of its run open for as long as it lives.

    Raises:
        RequestError: it belongs to another user, or is another program of this user.
    """
    if not launcher.lives:
        return
    if not is_own(launcher.pid):
        raise RequestError(f"process {launcher.pid} belongs to another user: ask them to cancel the run")
    if not has_open(launcher.pid, record.run.journal_file):
        raise RequestError(
            f"process {launcher.pid}, which {record.run.launcher_file} names, is not the launcher of {record.run_id}: "
            "nothing was done"
        )


def _signal(process: Process) -> None:
    try:
        if process.lives:
            os.kill(process.pid, signal.SIGINT)
    except ProcessLookupError:
        return
    except PermissionError:
        raise RequestError(f"process {process.pid} belongs to another user: ask them to cancel the run") from None


def _cancel_jobs(rows: list[Row]) -> None:
    """Cancels the jobs of runs, with one call for each scheduler."""
    jobs: dict[str, list[str]] = {}
    for row in rows:
        jobs.setdefault(row.launcher, []).append(row.job_id or "")
    for name, job_ids in jobs.items():
        launcher = queue_named(name)
        if launcher is None:
            raise RequestError(f"launcher={name} is not installed here: cancel job {job_ids[0]} where it is")
        launcher.cancel(job_ids)


def _send(folders: list[Path]) -> None:
    """Sends journals to MLflow in a separate process, so that this one does not import mlflow."""
    if not folders:
        return
    words = ["sync", *map(str, folders)]
    try:
        subprocess.run(
            [*module_command("ortlaunch"), *words], stdout=subprocess.DEVNULL, timeout=_SYNC_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        say(f"MLflow does not know all of it yet: {shlex.join(['ortlaunch', *words])}", file=sys.stderr)


def _wait_until(check_end: Callable[[], bool], deadline: float, pause: float) -> bool:
    """Waits until a run has ended, until `deadline` on the monotonic clock at most; returns whether it has ended."""
    while not check_end():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


def _grace_seconds(run_dir: Path) -> float:
    seconds = Run(run_dir).setting("launcher.grace_seconds")
    sound = isinstance(seconds, int | float) and 0 <= seconds < math.inf
    return float(seconds if sound else LauncherConfig.grace_seconds)


def _outcome_text(row: Row, *, has_ended: bool) -> str:
    if not has_ended:
        remedy = f"To end it at once, without a checkpoint: ortlaunch cancel {row.run_id} --now"
        return f"{_described(row)} still goes on: {_state_text(row)}. {remedy}"
    if row.state is State.FINISHED:
        return f"{_described(row)} had made its last step before it could be stopped: finished"
    if row.state is State.STOPPED:
        kept = " with a checkpoint" if row.checkpoint else ""
        return f"{_described(row)} stopped {row.reason}{kept}. Go on with: ortlaunch resume {row.run_id}"
    if row.checkpoint:
        kept = f"its newest checkpoint is {row.checkpoint}. Go on with: ortlaunch resume {row.run_id}"
        return f"{_described(row)} was ended; {kept}"
    return f"{_described(row)} was ended; it has left no checkpoint"


def _described(row: Row) -> str:
    return f"{row.name} ({row.run_id}{f', job {row.job_id}' if row.job_id else ''})"


def _state_text(row: Row) -> str:
    return row.state.value + (f", {row.reason}" if row.reason else "")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ortlaunch cancel",
        description="End runs. Each finishes its step and writes a checkpoint first, from which resume goes on.",
    )
    parser.add_argument("run", metavar="RUN", nargs="+", help=f"{HELP}; or a sweep, for all of its runs")
    parser.add_argument("--now", action="store_true", help="end it at once, without a checkpoint")
    parser.add_argument(
        "--wait",
        type=seconds,
        metavar="SECONDS",
        help="longest wait for its end (default: launcher.grace_seconds + 75)",
    )
    return parser
