"""`ortlaunch sync`: sends run folders that MLflow does not have, or has only in part."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ortlaunch.base.arguments import Parser
from ortlaunch.base.errors import RequestError
from ortlaunch.base.ownership import why_foreign
from ortlaunch.base.text import counted, say
from ortlaunch.config.tracking_uri import sqlite_path
from ortlaunch.follow.find import HELP, find_run
from ortlaunch.launch.table import queue_named
from ortlaunch.run import claim
from ortlaunch.run.ending import end_run
from ortlaunch.run.liveness import Alive, liveness
from ortlaunch.run.record import scheduler_of
from ortlaunch.run.roots import RUN_ROOT
from ortlaunch.run.run import Run, is_job_id, runs_below
from ortlaunch.run.sweep import runs_of, task_of
from ortlaunch.tracking.destination import destinations_of, is_without_trackers
from ortlaunch.tracking.mlflow import check_file
from ortlaunch.tracking.relay import SinkResult, sync
from ortlaunch.tracking.state import unattended

_QUIET_SECONDS = 30
_ENDED = {"FINISHED": "had finished", "KILLED": "was killed"}


def sync_main(args: list[str], run_root: Path = RUN_ROOT) -> int:
    """Runs `ortlaunch sync`.

    Args:
        args: The command line after the verb.
        run_root: Where `--all` looks if no folder is given.

    Returns:
        0 if MLflow has everything, 1 if something is left.

    Raises:
        RequestError: There is no such run, or nothing says where to send it.
    """
    options = _parser().parse_args(args)
    if (path := sqlite_path(options.uri or "")) is not None:
        # Before a run's folder gets a log of what was not sent.
        check_file(options.uri, path, "--uri")
    run_dirs = _requested(options, run_root)
    destinations, all_sent = _destinations(run_dirs, options)
    for run_dir, cfgs in destinations:
        end_note = end_if_dead(run_dir)
        result = sync(run_dir, *cfgs, asks=True)
        all_sent &= result.sent
        for sink_result in result.sinks:
            say(_line(run_dir, sink_result, end_note))
    sent = set(run_dirs)
    for run_dir, cfgs in destinations:
        # A sweep ends with its last run, so its own journal may have changed.
        task = task_of(run_dir)
        if task is not None and task.folder.is_dir() and task.folder not in sent and why_foreign(task.folder) is None:
            all_sent &= sync(task.folder, *cfgs, asks=True).sent
            sent.add(task.folder)
    return 0 if all_sent else 1


def _destinations(run_dirs: list[Path], options: argparse.Namespace) -> tuple[list[tuple[Path, list[Any]]], bool]:
    """Returns the trackers of each run, and whether all have some; with `--all` one that has none stops no other."""
    found, complete = [], True
    for run_dir in run_dirs:
        try:
            found.append((run_dir, _believed(run_dir, options.uri)))
        except RequestError as error:
            if not options.all:
                raise
            say(f"ortlaunch: {error}", file=sys.stderr)
            complete = False
    return found, complete


def _believed(run_dir: Path, uri: str | None) -> list[Any]:
    """The trackers to send a run to. Those of a folder that is not this user's own are not believed.

    Raises:
        RequestError: the folder is no run folder, nothing says where to send it, or only a folder that another user
            may have written does.
    """
    files = (run_dir, Run(run_dir).config_file, Run(run_dir).journal_file, Run(run_dir).relay_file)
    why = next((f"{file} {why}" for file in files if (why := why_foreign(file))), None)
    if why is not None and uri is None:
        raise RequestError(
            f"sync: {why}: name the store with --uri, because the folder's own configuration is not trusted"
        )
    cfgs = destinations_of(run_dir, uri)
    return cfgs if why is None else cfgs[:1]


def _requested(options: argparse.Namespace, run_root: Path) -> list[Path]:
    """Returns the run folders to send. `--all` leaves out runs without a tracker, unless `--uri` names a store.

    Raises:
        RequestError: no run is named, there is no such run, or several match.
    """
    named = [Path(folder).expanduser() for folder in options.run]
    if not options.all:
        if not named:
            raise RequestError("sync: name the runs to send, or send all with --all")
        # A folder stays as it was given: it may be that of a sweep, which has a journal of its own.
        return [
            folder if "/" in asked or folder.exists() else find_run(asked).path
            for asked, folder in zip(options.run, named, strict=True)
        ]
    found = _all_below(named or [run_root])
    if options.uri is not None:
        return found
    tracked = [run_dir for run_dir in found if not _is_untracked(run_dir)]
    if untracked := len(found) - len(tracked):
        runs = counted(untracked, "run")
        print(f"left out: {runs} started without MLflow (tracking=none); --uri names a store for them")
    return tracked


def _is_untracked(run_dir: Path) -> bool:
    """Whether a run was started without a tracker. A configuration that cannot be read is told of later."""
    try:
        return is_without_trackers(run_dir)
    except RequestError:
        return False


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="ortlaunch sync", description="Send to MLflow what it does not have yet of these runs.")
    parser.add_argument("run", nargs="*", metavar="RUN", help=f"{HELP}; with --all a folder of them")
    parser.add_argument("--all", action="store_true", help="every run folder below RUN (default: the run root)")
    parser.add_argument("--uri", help="tracking URI to send to instead of the one that the run was started with")
    return parser


def _all_below(roots: list[Path]) -> list[Path]:
    run_dirs = sorted(run.path for root in roots for run in runs_below(root))
    if not run_dirs:
        raise RequestError(f"sync --all: no run folder below {', '.join(map(str, roots))}")
    return run_dirs


def _line(run_dir: Path, result: SinkResult, end_note: str) -> str:
    text = f"{run_dir}: {counted(result.sent_events, 'event')} sent, {result.where}"
    return "; ".join(part for part in (text, end_note, result.message) if part)


def end_if_dead(run_dir: Path) -> str:
    """Journals the end of a run whose launcher was killed before it could: FINISHED if all steps are done, else KILLED.

    Returns:
        What was found, in a few words; empty for a run that has its end.
    """
    run = Run(run_dir)
    # A relay that works means that the launcher works too. The lock also prevents two commands from ending a run twice.
    with unattended(run_dir) as free:
        try:
            if free and run.journal_kept_end():
                return "its end was journalled"
        except OSError as error:
            return f"its end cannot be journalled: {error.strerror}"
        state = run.state()
        if state.last is None or state.ended is not None:
            return ""
        if not free or _may_live(run):
            return "still running, or killed a moment ago: sync again for its end"
        end = run.lost_end()
        try:
            with _claimed(run):
                if run.state().ended is None:
                    with run.journal() as journal:
                        end_run(run, journal, end, at=state.last)
        except RequestError:
            return "is being launched again"
        except OSError as error:
            return f"{_ENDED[end]}, which cannot be journalled: {error}"
        return _ENDED[end]


@contextmanager
def _claimed(run: Run) -> Iterator[None]:
    """Keeps others from launching a run whose last job or launcher is gone. Nobody launches a sweep's folder again.

    Raises:
        RequestError: another process holds the run.
        OSError: the claim cannot be written.
    """
    if runs_of(run.path) is not None:
        yield
        return
    over = (run.job() or {}).get("job_id")
    held = claim.take(run, job_is_over=lambda job: job == over)
    try:
        yield
    finally:
        held.release()


def _may_live(run: Run) -> bool:
    if (job := run.job()) is not None and is_job_id(job.get("job_id")):
        launcher = queue_named(scheduler_of(job) or "")
        quiet = time.time() - run.journal_file.stat().st_mtime
        return launcher is None or launcher.may_live(str(job["job_id"])) or quiet < _QUIET_SECONDS
    if (runs := runs_of(run.path)) is not None and run.launcher() is None:
        # A sweep in a queue lives as long as one of its runs has not ended.
        return any(Run(one).state().ended is None for one in runs)
    return liveness(run).alive is not Alive.NOTHING
