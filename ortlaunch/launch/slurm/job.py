"""What a job's batch script does beside its workers: ``python -m ortlaunch.launch.slurm.job VERB RUN_DIR ...``.

begin     an attempt begins: says so in the journal and prints how many there were before; 3 if there is nothing to do
relay     sends the journal to MLflow until SIGUSR1
decide    CODE [SIGNAL ...]: the workers have ended; journals how, and prints what is to be done
refused   the job could not be queued again
announce  sends what is in the journal, once: what a relay that failed has left
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from ortlaunch.base.errors import RequestError
from ortlaunch.config.load import load_config
from ortlaunch.config.schema import SlurmConfig
from ortlaunch.launch.environment import slurm_variables
from ortlaunch.launch.slurm import history
from ortlaunch.launch.slurm.announce import send, tracking_of
from ortlaunch.launch.slurm.fitness import attempt_token, only_silence, problems
from ortlaunch.launch.slurm.scheduler import ALIVE, job_state, own_job
from ortlaunch.launch.slurm.verdict import REQUEUE_WORD, Facts, Verdict, judge
from ortlaunch.run import claim, failure, sweep
from ortlaunch.run.events import Status
from ortlaunch.run.goodput import journal_goodput
from ortlaunch.run.journal import Journal
from ortlaunch.run.liveness import has_workers
from ortlaunch.run.run import ARTIFACT_FOLDER, Run

_NOTHING_TO_DO = 3
_STATES = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "stopped"}
_MOST_LOGS = 16
_CLOCK_SECONDS = 90
"""SLURM looks at its clock every 30 seconds, and may send the warning a minute early."""


def begin(run_dir: Path) -> int:
    """An attempt begins."""
    run = Run(run_dir)
    if run.is_done():
        print(f"ortlaunch: {run_dir} is done", file=sys.stderr)
        return _NOTHING_TO_DO
    try:
        claim.take(run, own_job(), lambda job: _is_over(job, run))
    except RequestError as error:
        print(f"ortlaunch: {error}", file=sys.stderr)
        return _NOTHING_TO_DO
    journal = Run(run_dir).journal()
    if Run(run_dir).stop_word() not in (None, REQUEUE_WORD):
        journal.tags({"ortlaunch.state": "stopped"})
        journal.end("KILLED")
        _send(run_dir)
        _note_end(run_dir, "KILLED")
        print("ortlaunch: the run was asked to stop while it was in the queue", file=sys.stderr)
        return _NOTHING_TO_DO
    # What the attempt before has left about itself.
    for file in (run.stop_file, run.stopped_file):
        file.unlink(missing_ok=True)
    for folder in (run.failures, run.preflight):
        shutil.rmtree(folder, ignore_errors=True)
    past = history.load(run_dir)
    restart = os.environ.get("SLURM_RESTART_COUNT", "0")
    nodes = os.environ["SLURM_JOB_NODELIST"]
    attempt = past.begin(os.environ["SLURM_JOB_ID"], int(restart), nodes)
    history.save(run_dir, past)
    os.environ["ORTLAUNCH_ATTEMPT"] = str(attempt)
    run.preflight_token.write_text(attempt_token())
    journal.tags(
        {
            "ortlaunch.state": "running",
            "ortlaunch.attempt": str(attempt + 1),
            "slurm.job_id": os.environ["SLURM_JOB_ID"],
            "slurm.restart_count": restart,
            "slurm.nodes": nodes,
        }
    )
    own = run.scheduler_variables(attempt)
    own.write_text(json.dumps(slurm_variables(), indent=2) + "\n")
    journal.artifact(own, ARTIFACT_FOLDER)
    print(attempt)
    return 0


def _is_over(job: str, run: Run) -> bool:
    """Whether another job that has claimed the run is over; one that SLURM does not know is judged by its workers."""
    known = job_state(job)
    return not has_workers(run) if known is None else known.state not in ALIVE


def relay(run_dir: Path) -> int:
    """Sends the journal to MLflow until SIGUSR1, then what is left of it for as long as the configuration says."""
    over = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: over.set())
    tracking = tracking_of(run_dir)
    if tracking is None:
        return 0
    from ortlaunch.tracking.relay import Relay

    sender = Relay(run_dir, tracking)
    sender.start()
    over.wait()
    result = sender.finish(tracking.flush_seconds)
    if result.message:
        print(f"ortlaunch: {result.message}", flush=True)
    return 0


def decide(run_dir: Path, code: int, signals: list[str]) -> int:
    """The workers have ended: journals how and prints the batch script's next step."""
    facts = gather(run_dir, code, signals)
    verdict = judge(facts)
    journal = Run(run_dir).journal()
    lost = verdict.action == "requeue" and "LOST" in facts.signals
    if lost or verdict.is_crash or verdict.status == "FAILED":
        verdict = _with_failure(run_dir, verdict, journal, facts.signals)
    past = history.load(run_dir)
    past.end(verdict.reason, is_crash=verdict.is_crash, checkpoint=Run(run_dir).newest_checkpoint())
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
        journal.tags({"ortlaunch.state": _STATES[verdict.status]})
        journal_goodput(journal)
        journal.end(verdict.status)
        _note_end(run_dir, verdict.status)
    print(f"ortlaunch: {verdict.action}: {verdict.reason}", file=sys.stderr, flush=True)
    # A job that SLURM has taken off its nodes already is queued by SLURM.
    print({"again": "again", "requeue": "requeue", "left": "end 0", "end": f"end {verdict.code}"}[verdict.action])
    return 0


def refused(run_dir: Path) -> int:
    """SLURM would not queue the job again: the run ends here, with its checkpoint."""
    journal = Run(run_dir).journal()
    text = "scontrol requeue was refused: the cluster does not let jobs queue again; go on with ortlaunch resume"
    journal.tags({"ortlaunch.state": "stopped", "ortlaunch.requeue_reason": text})
    journal_goodput(journal)
    journal.end("KILLED")
    _note_end(run_dir, "KILLED")
    print(f"ortlaunch: {text} {run_dir}", file=sys.stderr)
    return _send(run_dir)


def announce(run_dir: Path) -> int:
    """Sends what is in the journal, once."""
    return _send(run_dir)


def gather(run_dir: Path, code: int, signals: list[str]) -> Facts:
    """The facts about a run whose workers have ended, from its folder and, where they leave it open, from SLURM."""
    config = load_config(Run(run_dir).config_file)
    cfg = config.launcher
    assert isinstance(cfg, SlurmConfig)
    job_id, past = os.environ["SLURM_JOB_ID"], history.load(run_dir)
    stopped = Run(run_dir).stopped()
    is_done = Run(run_dir).is_done()
    known = None if is_done else job_state(own_job())
    if "UNFIT" in signals and only_silence(run_dir, code):
        signals = [*signals, "LOST"]
    return Facts(
        code=code,
        signals=frozenset(signals),
        is_done=is_done,
        is_request=failure.is_request(run_dir),
        stopped_by=stopped.reason if stopped is not None else None,
        asked_by=Run(run_dir).stop_word(),
        job_state=known.state if known else None,
        is_requeued=known is not None and known.restarts > int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        is_out_of_time=known is not None and known.seconds_left < cfg.grace_seconds + _CLOCK_SECONDS,
        is_preempted=known is not None and known.is_preempted,
        crashes=past.crashes(job_id),
        max_restarts=cfg.max_restarts,
        barren=past.barren(job_id, Run(run_dir).newest_checkpoint()),
        requeue_limit=cfg.requeue_limit,
    )


def _with_failure(run_dir: Path, verdict: Verdict, journal: Journal, signals: frozenset[str]) -> Verdict:
    """The verdict with the first failure's words; of a run's end they are journalled as its failure."""
    unfit = problems(run_dir) if signals & {"UNFIT", "LOST"} else ""
    # What the workers of a lost node's peers say follows from the loss.
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


def _note_end(run_dir: Path, status: Status) -> None:
    """Of the last run of a sweep: the sweep has ended too."""
    over = sweep.note_end(run_dir, status)
    if over is not None:
        _send(over)


def _send(folder: Path) -> int:
    result = send(folder)
    if result is None:
        return 0
    print(result.message or f"mlflow run {result.mlflow_run_id}", file=sys.stderr, flush=True)
    return 0 if result.sent else 1


_VERBS: dict[str, Callable[[Path], int]] = {"begin": begin, "relay": relay, "refused": refused, "announce": announce}


def main() -> int:
    """Runs the command line; returns the exit code."""
    verb, run_dir, *rest = sys.argv[1:]
    if verb == "decide":
        return decide(Path(run_dir), int(rest[0]), rest[1:])
    return _VERBS[verb](Path(run_dir))


if __name__ == "__main__":
    sys.exit(main())
