"""What a job's batch script does beside its workers: ``python -m ortlaunch.launch.slurm.job VERB RUN_DIR ...``.

begin     an attempt begins: says so in the journal and prints how many there were before; 3 if there is nothing to do
relay     sends the journal to MLflow until SIGUSR1
decide    CODE [SIGNAL ...]: the workers have ended; journals how, and prints what is to be done
refused   the job could not be queued again
announce  sends what is in the journal, once: what a relay that failed has left
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from ortlaunch.base import exit_codes
from ortlaunch.base.errors import RequestError
from ortlaunch.launch.queue import attempt
from ortlaunch.launch.queue.announce import destinations
from ortlaunch.launch.slurm.fitness import attempt_token, only_silence, problems
from ortlaunch.launch.slurm.launcher import SlurmLauncher
from ortlaunch.run.run import Run

_NOTHING_TO_DO = 3


def begin(run_dir: Path) -> int:
    """An attempt begins."""
    launcher = SlurmLauncher()
    before = attempt.begin(launcher, run_dir, launcher.own_job())
    if before is None:
        return _NOTHING_TO_DO
    Run(run_dir).preflight_token.write_text(attempt_token())
    print(before)
    return 0


def relay(run_dir: Path) -> int:
    """Sends the journal to the trackers until SIGUSR1, then the rest for as long as the configuration says."""
    over = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: over.set())
    cfgs = destinations(run_dir)
    if not cfgs:
        return 0
    from ortlaunch.tracking.relay import Relay
    from ortlaunch.tracking.trackers import flush_seconds

    sender = Relay(run_dir, *cfgs)
    sender.start()
    over.wait()
    result = sender.finish(flush_seconds(cfgs))
    if result.message:
        print(f"ortlaunch: {result.message}", flush=True)
    return 0


def decide(run_dir: Path, code: int, signals: list[str]) -> int:
    """The workers have ended: journals how and prints the batch script's next step."""
    if "UNFIT" in signals and only_silence(run_dir, code):
        signals = [*signals, "LOST"]
    unfit = problems(run_dir) if {"UNFIT", "LOST"} & {*signals} else ""
    launcher = SlurmLauncher()
    facts = attempt.gather(launcher, run_dir, code, signals)
    verdict = attempt.decide(facts, run_dir, launcher.own_job().key, unfit)
    # A job that SLURM has taken off its nodes already is queued by SLURM.
    print({"again": "again", "requeue": "requeue", "left": "end 0", "end": f"end {verdict.code}"}[verdict.action])
    return 0


def refused(run_dir: Path) -> int:
    """SLURM would not queue the job again."""
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
        print(f"ortlaunch: {error}", file=sys.stderr)
        return exit_codes.REQUEST


if __name__ == "__main__":
    sys.exit(main())
