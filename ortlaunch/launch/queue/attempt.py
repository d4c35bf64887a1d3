"""Begins and ends an attempt of a run in a job: writes its record, and decides what the job does next."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from ortlaunch.base.errors import RequestError
from ortlaunch.base.files import replace_text
from ortlaunch.config.load import load_run_config, save_config
from ortlaunch.config.schema import AutoConfig, Config
from ortlaunch.launch.auto import decided, keep_rate, recorded
from ortlaunch.launch.folder import restore_configuration
from ortlaunch.launch.planning import stored
from ortlaunch.launch.queue import history
from ortlaunch.launch.queue.announce import send
from ortlaunch.launch.queue.launcher import BatchLauncher
from ortlaunch.launch.queue.own import OwnJob
from ortlaunch.launch.queue.verdict import REQUEUE_WORD, Facts, Verdict, judge
from ortlaunch.launch.work import work_of
from ortlaunch.run import claim, failure
from ortlaunch.run.ending import end_run
from ortlaunch.run.events import Status
from ortlaunch.run.journal import Journal
from ortlaunch.run.liveness import has_workers
from ortlaunch.run.run import ARTIFACT_FOLDER, Run
from ortlaunch.tracking import trackers

_MOST_LOGS = 16
_LEAVING_SECONDS = 90.0
"""A former job whose run has ended may take this long to leave its nodes."""
_POLL_SECONDS = 0.5
_CLOCK_SECONDS = 90
"""Tolerance for the time limit: schedulers check it about every 30 seconds and may warn a minute early."""


def begin(launcher: BatchLauncher, run_dir: Path, job: OwnJob) -> int | None:
    """Begins an attempt and writes this to the history and the journal.

    Args:
        launcher: the launcher of the job.
        run_dir: the run folder.
        job: the job that starts it.

    Returns:
        How many attempts there were before; None if there is nothing to do.

    Raises:
        RequestError: another launcher or job has the run, or its folder cannot be written.
    """
    try:
        return _begun(launcher, Run(run_dir), job)
    except OSError as error:
        raise RequestError(
            f"{run_dir} cannot be written: {error.strerror or error}: when it can, ortlaunch resume {run_dir}"
        ) from error


def _begun(launcher: BatchLauncher, run: Run, job: OwnJob) -> int | None:
    """Begins an attempt; see `begin`."""
    run_dir = run.path
    if run.is_done() and run.state().ended is not None:
        print(f"ortlaunch: {run_dir} is done", file=sys.stderr)
        return None
    _claim(launcher, run, job)
    if run.is_done():
        _end_before_start(run, job, "FINISHED", "all steps were done when the job before was ended")
        return None
    if run.stop_word() not in (None, REQUEUE_WORD):
        _end_before_start(run, job, "KILLED", "the run was asked to stop while it was in the queue")
        return None
    _remove_earlier_files(run)
    past = history.load(run_dir)
    attempt = past.begin(job.job_id, job.restart, job.nodes)
    history.save(run_dir, past)
    # The workers inherit these variables.
    os.environ |= {"ORTLAUNCH_ATTEMPT": str(attempt), "ORTLAUNCH_JOB": job.job_id}
    _journal_begin(run, job, attempt)
    _decide_backend(run)
    return attempt


def _end_before_start(run: Run, job: OwnJob, status: Status, why: str) -> None:
    """Ends a run whose workers need not start."""
    _end(run, run.journal(is_patient=True), job.key, status)
    send_all(run.path)
    print(f"ortlaunch: {why}", file=sys.stderr)


def _end(run: Run, journal: Journal, job: str, status: Status, reason: Mapping[str, str] | None = None) -> None:
    """Ends the run of a job. If it was the last one of its sweep, the end of the sweep is sent too."""
    ending = end_run(run, journal, status, partial(claim.release_of, run, job), tags=reason, is_job=True)
    if ending.sweep is not None:
        send_all(ending.sweep)


def _remove_earlier_files(run: Run) -> None:
    """Removes files of the previous attempt, which must not be taken for those of this one."""
    for file in (run.stop_file, run.stopped_file):
        file.unlink(missing_ok=True)
    for folder in (run.failures, run.preflight):
        shutil.rmtree(folder, ignore_errors=True)
    run.clear_scratch()


def _journal_begin(run: Run, job: OwnJob, attempt: int) -> None:
    """Journals that an attempt begins, and in which job it runs.

    Args:
        run: the run.
        job: the job.
        attempt: how many attempts there were before.
    """
    journal = run.journal()
    journal.tags(
        {
            "ortlaunch.state": "running",
            "ortlaunch.attempt": str(attempt + 1),
            f"{job.scheduler}.job_id": job.job_id,
            f"{job.scheduler}.restart_count": str(job.restart),
            f"{job.scheduler}.nodes": job.nodes,
        }
    )
    own = run.scheduler_variables(attempt, job.scheduler)
    replace_text(own, json.dumps(job.variables, indent=2) + "\n")
    journal.artifact(own, ARTIFACT_FOLDER)


def _decide_backend(run: Run) -> None:
    """Decides what ``backend=auto`` is in this run, before its workers start, for those of all nodes."""
    asked = load_run_config(run.config_file)
    if not (isinstance(asked, Config) and isinstance(asked.backend, AutoConfig)):
        return
    config, why = recorded(asked, run), "backend=auto keeps what the run has begun with"
    if isinstance(config.backend, AutoConfig):
        backend, why = decided(config)
        config = dataclasses.replace(config, backend=backend)
    save_config(trackers.public(config), run.config_file)
    print(why, file=sys.stderr, flush=True)
    run.journal().tags({"ortlaunch.backend": config.backend.name, "ortlaunch.backend_reason": why})


def _claim(launcher: BatchLauncher, run: Run, job: OwnJob) -> None:
    """Claims the run. Waits for the command that is still submitting this job, or for a former job that is leaving.

    Raises:
        RequestError: another launcher or job has the run.
    """
    deadline = time.monotonic() + _LEAVING_SECONDS
    while True:
        try:
            claim.take(run, job.key, lambda other: _is_over(launcher, other, run))
        except RequestError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_SECONDS)
        else:
            return


def _is_over(launcher: BatchLauncher, job_id: str, run: Run) -> bool:
    """Returns whether a job that has claimed the run is over. If the launcher cannot tell, the workers' lock does."""
    answer = launcher.is_over(job_id)
    return not has_workers(run) if answer is None else answer


def decide(facts: Facts, run_dir: Path, job: str, unfit: str = "") -> Verdict:
    """Journals how the workers have ended, and returns what the job does next.

    Args:
        facts: as `gather` finds them.
        run_dir: the run folder.
        job: the job's id, as its claim has it.
        unfit: why the job's nodes are unfit, which is then the cause of the workers' errors; empty if they are fit.
    """
    verdict = judge(facts)
    Run(run_dir).clear_scratch()
    # Where the disk is full, the verdict still holds.
    journal = Run(run_dir).journal(is_patient=True)
    lost = verdict.action == "requeue" and "LOST" in facts.signals
    if lost or verdict.is_crash or verdict.status == "FAILED":
        verdict = _with_failure(run_dir, verdict, journal, unfit)
    past = history.load(run_dir)
    past.end(verdict.reason, is_crash=verdict.is_crash, checkpoint=_progress(Run(run_dir)))
    with _said_where_full("the history"):
        history.save(run_dir, past)
    if verdict.status is None:
        journal.requeue(verdict.reason, len(past.attempts))
        state = "running" if verdict.action == "again" else "queued"
        journal.tags(
            {
                "ortlaunch.state": state,
                "ortlaunch.requeue_reason": verdict.reason,
                "ortlaunch.requeues": str(len(past.attempts)),
            }
        )
    else:
        if facts.is_request and verdict.status == "FAILED":
            with _said_where_full("the configuration"):
                restore_configuration(Run(run_dir), Run(run_dir).state().attempts - 1)
        _end(Run(run_dir), journal, job, verdict.status)
        if verdict.status == "FINISHED":
            with suppress(OSError):  # It reads the journal.
                keep_rate(stored(run_dir))
    if journal.problem:
        print(f"ortlaunch: {journal.path} cannot be written ({journal.problem})", file=sys.stderr)
    print(f"ortlaunch: {verdict.action}: {verdict.reason}", file=sys.stderr, flush=True)
    return verdict


@contextmanager
def _said_where_full(what: str) -> Iterator[None]:
    """Goes on where something cannot be written, and says so."""
    try:
        yield
    except OSError as error:
        print(f"ortlaunch: {what} cannot be written: {error.strerror or error}", file=sys.stderr)


def refused(run_dir: Path, command: str, job: str) -> None:
    """Ends a run whose job the scheduler has refused to queue again. The run keeps its checkpoint.

    Args:
        run_dir: the run folder.
        command: the refused command.
        job: the job's id, as its claim has it.
    """
    run = Run(run_dir)
    text = f"{command} was refused: the cluster does not let jobs queue again; go on with ortlaunch resume"
    _end(run, run.journal(is_patient=True), job, "KILLED", {"ortlaunch.requeue_reason": text})
    print(f"ortlaunch: {text} {run_dir}", file=sys.stderr)
    send_all(run_dir)


def gather(launcher: BatchLauncher, run_dir: Path, code: int, signals: Iterable[str]) -> Facts:
    """Collects the facts about a run whose workers have ended, from its folder and, if it is not done, the scheduler.

    Args:
        launcher: the launcher of the job.
        run_dir: the run folder.
        code: exit code of the command that started the workers.
        signals: as in `Facts`.
    """
    run = Run(run_dir)
    config = load_run_config(run.config_file)
    job, past = launcher.own_job(), history.load(run_dir)
    is_done, stopped = run.is_done(), run.stopped()
    answer = None if is_done else launcher.own_state()
    return Facts(
        code=code,
        signals=frozenset(signals),
        is_done=is_done,
        is_request=failure.is_request(run_dir),
        has_failed=failure.first(run_dir) is not None,
        stopped_by=stopped.reason if stopped is not None else None,
        asked_by=run.stop_word(),
        job_state=answer.state if answer else None,
        is_requeued=answer is not None and answer.restarts > job.restart,
        is_out_of_time=answer is not None and answer.seconds_left < config.launcher.grace_seconds + _CLOCK_SECONDS,
        is_preempted=answer is not None and answer.is_preempted,
        crashes=past.crashes(job.job_id),
        max_restarts=config.launcher.max_restarts,
        without_checkpoint=past.without_checkpoint(job.job_id, _progress(run)),
        requeue_limit=launcher.requeue_limit(config),
        scheduler=launcher.title,
        starter=launcher.starter,
    )


def _progress(run: Run) -> str:
    """What the run has to go on from. A run whose configuration cannot be read has nothing."""
    with suppress(RequestError, FileNotFoundError):
        return work_of(load_run_config(run.config_file)).progress(run)
    return ""


def _with_failure(run_dir: Path, verdict: Verdict, journal: Journal, unfit: str) -> Verdict:
    """Returns the verdict with the first failure's message, and journals the failure if the run has ended."""
    # If a node is unfit or lost, the errors of the other nodes' workers only follow from that.
    found = failure.Failure(0, "the cluster", unfit, False, 0.0) if unfit else _first_failure(run_dir)
    if found is None:
        return verdict
    where = "" if unfit else f"rank {found.rank} on {found.host}: "
    print(f"ortlaunch: {verdict.reason}: {where}{found.message}", file=sys.stderr, flush=True)
    if verdict.status is not None:
        journal.failure(found.rank, found.host, found.message)
    return dataclasses.replace(verdict, reason=f"{verdict.reason}: {where}{found.gist}")


def _first_failure(run_dir: Path) -> failure.Failure | None:
    logs = sorted(Run(run_dir).logs.glob("torchrun-*.log"), key=lambda path: path.stat().st_mtime)
    found = [one for log in logs[:_MOST_LOGS] if (one := failure.first(run_dir, log)) is not None]
    return min(found, key=lambda one: one.time, default=None)


def send_all(folder: Path) -> int:
    """Sends a journal once; returns 1 if some of it could not be sent."""
    result = send(folder)
    if result is None:
        return 0
    ids = [f"mlflow run {result.mlflow_run_id}"] if result.mlflow_run_id else []
    print(result.message or ", ".join(ids) or "sent", file=sys.stderr, flush=True)
    return 0 if result.sent else 1
