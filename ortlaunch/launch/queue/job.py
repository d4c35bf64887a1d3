"""Runs a run inside its job: ``python -m ortlaunch.launch.queue.job RUN_DIR``, on the job's first node.

A launcher's script starts this program. It begins an attempt, starts the workers on the job's nodes
(`BatchLauncher.on_each_node`) and sends the journal to MLflow meanwhile. After the workers have ended, it decides
whether they start again here, the job is queued again, or the run is over. At the scheduler's warning or SIGTERM, the
workers finish their step and write a checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from ortlaunch.base import exit_codes, last_resort, output
from ortlaunch.base.errors import RequestError, TrainingError
from ortlaunch.base.programs import module_command
from ortlaunch.base.text import say
from ortlaunch.launch.local.workers import WorkerGroup
from ortlaunch.launch.outages import Outages
from ortlaunch.launch.plan import LaunchPlan, Start
from ortlaunch.launch.planning import stored
from ortlaunch.launch.presence import Presence, describe
from ortlaunch.launch.queue.announce import destinations
from ortlaunch.launch.queue.attempt import begin, decide, gather, refused
from ortlaunch.launch.queue.launcher import BatchLauncher
from ortlaunch.launch.queue.own import OwnJob
from ortlaunch.launch.queue.verdict import REQUEUE_WORD
from ortlaunch.launch.samples import Samples
from ortlaunch.launch.stalls import Stalls
from ortlaunch.launch.table import launcher_of
from ortlaunch.run.run import Run
from ortlaunch.tracking import trackers
from ortlaunch.tracking.relay import Relay

_POLL_SECONDS = 0.5
_PATIENCE = 0.8
"""Share of the grace period after which the workers are ended, even if their checkpoint is not complete."""


def main() -> int:
    """Runs the command line; returns the exit code of the job."""
    run_dir = Path(sys.argv[1]).absolute()
    schedulers = os.dup(2)
    try:
        return run_job(*launcher_and_plan(run_dir))
    except (RequestError, TrainingError) as error:
        text, code = str(error), exit_codes.REQUEST if isinstance(error, RequestError) else exit_codes.FAILED
    except Exception as error:
        last_resort.keep_traceback_in(Run(run_dir).launcher_error)
        text, code = last_resort.explained(error)
    line = f"ortlaunch: {last_resort.shortened(text)}\n".encode(errors="backslashreplace")
    try:
        os.write(2, line)
    except OSError:
        # The job's log is in the run folder, which may be why the job ends: its disk is full.
        with suppress(OSError):
            os.write(schedulers, line)
    return code


def launcher_and_plan(run_dir: Path) -> tuple[BatchLauncher, LaunchPlan]:
    """Returns the launcher of a run and its plan.

    Raises:
        RequestError: the launcher is not installed here, or has no jobs.
    """
    plan = stored(run_dir)
    launcher = launcher_of(plan.config)
    if not isinstance(launcher, BatchLauncher):
        raise RequestError(f"{run_dir}: launcher={launcher.name} does not run in jobs")
    return launcher, plan


def run_job(launcher: BatchLauncher, plan: LaunchPlan) -> int:
    """Runs the attempts of a run that this job can make.

    Returns:
        The exit code of the job.
    """
    run_dir = plan.run_dir
    output.append_to(plan.files.scheduler_log(launcher.name))
    signals = _Signals(launcher, run_dir)
    while True:
        job = launcher.own_job()
        print(f"--- job {job.job_id}, restart {job.restart}, on {job.nodes}", flush=True)
        if begin(launcher, run_dir, job) is None:
            return exit_codes.DONE
        code, relay = _workers(launcher, plan, signals)
        verdict = decide(gather(launcher, run_dir, code, signals.seen), run_dir, job.key)
        _finish(relay, run_dir)
        action = verdict.action
        # The warning may have come after the workers had ended. They would not get far in the rest of this job.
        if action == "again" and "WARNING" in signals.seen:
            action = "requeue"
        if action == "requeue":
            return _requeue(launcher, run_dir, job)
        if action != "again":
            return verdict.code


def _requeue(launcher: BatchLauncher, run_dir: Path, job: OwnJob) -> int:
    """Queues the job again, or ends the run if the scheduler refuses this; returns the exit code of the job."""
    if launcher.requeue(job):
        return exit_codes.DONE
    refused(run_dir, f"the requeue by {launcher.title}", job.key)
    return exit_codes.FAILED


class _Signals:
    """Remembers the scheduler's signals, and passes them on to the workers of all nodes by the STOP file."""

    def __init__(self, launcher: BatchLauncher, run_dir: Path) -> None:
        self.seen: list[str] = []
        """Names of the signals, as in `Facts.signals`."""
        self._since: float | None = None
        """Time of the first signal on the monotonic clock."""
        self._run_dir = run_dir
        self._names = {launcher.warning: "WARNING", signal.SIGTERM: "TERM"}
        for number in self._names:
            signal.signal(number, self._take)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        self.seen.append(self._names[signal.Signals(number)])
        self._since = self._since or time.monotonic()

    def pass_on(self) -> None:
        """Asks the workers to stop together after a checkpoint, unless they were already asked."""
        run = Run(self._run_dir)
        if self._since is not None and run.stop_word() is None and run.stopped() is None:
            run.ask_to_stop(REQUEUE_WORD)

    def came_before(self, seconds: float) -> bool:
        """Whether the first signal came more than `seconds` ago."""
        return self._since is not None and time.monotonic() > self._since + seconds


def _workers(launcher: BatchLauncher, plan: LaunchPlan, signals: _Signals) -> tuple[int, Relay | None]:
    """Runs the workers to their end, and sends what they journal to the trackers.

    Returns:
        The exit code of the command that started them, and the relay.
    """
    run, run_dir, config = plan.files, plan.run_dir, plan.config
    node = [*module_command("ortlaunch.launch.queue.node"), str(run_dir)]
    start = Start(launcher.on_each_node(config, node), launcher.variables(config))
    # The workers start before any thread of this process, because a fork may copy a lock that a thread holds.
    group = WorkerGroup(start, run.logs / f"{launcher.log}-nodes.log", time.time())
    cfgs = destinations(run_dir)
    relay = Relay(run_dir, *cfgs) if cfgs else None
    gone = Presence(run)
    stalls, samples = Stalls(run), Samples(run)
    outages = None if relay is None else Outages(run, relay)
    try:
        if relay is not None:
            relay.start()
        while (code := group.poll()) is None:
            if gone.is_over():
                raise TrainingError(describe(run))
            signals.pass_on()
            absent = outages.look() if outages is not None else []
            for line in [*group.lines(), *stalls.look(), *samples.look(), *absent]:
                print(line, flush=True)
            if signals.came_before(_PATIENCE * config.launcher.grace_seconds):
                signals.seen.append("LATE")
                break
            group.wait(_POLL_SECONDS)
    finally:
        group.kill()
    samples.journal()
    if outages is not None:
        outages.end()
    return (1 if code is None else code), relay


def _finish(relay: Relay | None, run_dir: Path) -> None:
    """Sends the rest of the journal, for at most the configured time."""
    if relay is None:
        return
    result = relay.finish(trackers.flush_seconds(destinations(run_dir)))
    if result.message:
        say(f"ortlaunch: {result.message}")


if __name__ == "__main__":
    sys.exit(main())
