"""The commands that a job's batch script calls: ``python -m ortlaunch.launch.slurm.job VERB RUN_DIR ...``.

begin     begins an attempt and prints how many there were before; exits with 3 if there is nothing to do
relay     sends the journal to MLflow until SIGUSR1, and says when a worker stands still or a tracker is away
decide    CODE [SIGNAL ...]: journals how the workers have ended, and prints the next step
refused   journals that the job could not be queued again
announce  sends the journal once, if a relay has failed
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from ortlaunch.base import exit_codes, last_resort
from ortlaunch.base.errors import RequestError
from ortlaunch.base.files import replace_text
from ortlaunch.base.text import say
from ortlaunch.launch.queue import attempt
from ortlaunch.launch.queue.announce import destinations
from ortlaunch.launch.queue.verdict import Verdict
from ortlaunch.launch.samples import Samples
from ortlaunch.launch.slurm.fitness import attempt_token, only_silence, problems
from ortlaunch.launch.slurm.launcher import SlurmLauncher
from ortlaunch.launch.stalls import Stalls
from ortlaunch.run.run import Run

if TYPE_CHECKING:
    from ortlaunch.launch.outages import Outages

_NOTHING_TO_DO = 3
_POLL_SECONDS = 0.5


def begin(run_dir: Path) -> int:
    """Begins an attempt and prints how many there were before; returns 3 if there is nothing to do."""
    launcher = SlurmLauncher()
    with _answering():
        before = attempt.begin(launcher, run_dir, launcher.own_job())
    if before is None:
        return _NOTHING_TO_DO
    replace_text(Run(run_dir).preflight_token, attempt_token())
    print(before)
    return 0


def relay(run_dir: Path) -> int:
    """Sends the journal to the trackers until SIGUSR1, then the rest for as long as the configuration says.

    Meanwhile it says in the job's log and in the journal when a worker stands still, or a tracker takes no events.
    """
    over = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: over.set())
    cfgs = destinations(run_dir)
    if not cfgs:
        _watch_workers(run_dir, over)
        return 0
    from ortlaunch.launch.outages import Outages
    from ortlaunch.tracking.relay import Relay
    from ortlaunch.tracking.trackers import flush_seconds

    sender = Relay(run_dir, *cfgs)
    sender.start()
    _watch_workers(run_dir, over, Outages(Run(run_dir), sender))
    result = sender.finish(flush_seconds(cfgs))
    if result.message:
        say(f"ortlaunch: {result.message}")
    return 0


def _watch_workers(run_dir: Path, over: threading.Event, outages: Outages | None = None) -> None:
    stalls, samples = Stalls(Run(run_dir)), Samples(Run(run_dir))
    while not over.wait(_POLL_SECONDS):
        for line in [*stalls.look(), *samples.look(), *(outages.look() if outages is not None else [])]:
            print(line, flush=True)
    samples.journal()


def decide(run_dir: Path, code: int, script_signals: list[str]) -> int:
    """Journals how the workers have ended, and prints the batch script's next step.

    Args:
        run_dir: the run folder.
        code: what srun ended with.
        script_signals: what the batch script knows, in the words of `Facts.signals`.
    """
    signals = set(script_signals)
    if "UNFIT" in signals and only_silence(run_dir, code):
        # The script cannot tell a node that is unfit from one that is lost.
        signals.add("LOST")
    node_problems = problems(run_dir) if signals & {"UNFIT", "LOST"} else ""
    launcher = SlurmLauncher()
    with _answering():
        facts = attempt.gather(launcher, run_dir, code, signals)
        verdict = attempt.decide(facts, run_dir, launcher.own_job().key, node_problems)
    print(_next_step(verdict))
    return 0


def _answering() -> AbstractContextManager[object]:
    """Keeps standard output for the answer, which the script reads whole. A package's tracker may print there."""
    return redirect_stdout(sys.stderr)


def _next_step(verdict: Verdict) -> str:
    """Returns a verdict as the batch script reads it: ``again``, ``requeue``, or ``end`` and an exit code."""
    if verdict.action in ("again", "requeue"):
        return verdict.action
    # If SLURM has already taken the job off its nodes (`left`), it also queues the job again, and the script ends.
    return f"end {verdict.code}"


def refused(run_dir: Path) -> int:
    """Journals that SLURM has refused to queue the job again."""
    attempt.refused(run_dir, "scontrol requeue", SlurmLauncher().own_job().key)
    return 0


_VERBS: dict[str, Callable[[Path], int]] = {
    "begin": begin,
    "relay": relay,
    "refused": refused,
    "announce": attempt.send_all,
}


def main() -> int:
    """Runs the command line; returns the exit code."""
    verb, run_dir, *rest = sys.argv[1:]
    try:
        if verb == "decide":
            return decide(Path(run_dir), int(rest[0]), rest[1:])
        return _VERBS[verb](Path(run_dir))
    except RequestError as error:
        say(f"ortlaunch: {error}", file=sys.stderr)
        return exit_codes.REQUEST
    except Exception as error:
        return last_resort.told(error, Run(Path(run_dir)).launcher_error)


if __name__ == "__main__":
    sys.exit(main())
