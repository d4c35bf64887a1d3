"""The attempts of a run in jobs, ``history.json`` in its folder: where each of them ran and why it ended."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ortlaunch.base.files import replace_text
from ortlaunch.base.reading import load_json
from ortlaunch.run.run import Run


@dataclass
class Attempt:
    """One start of the workers."""

    job_id: str
    restart: int
    """How often the scheduler had restarted the job."""
    nodes: str
    began: float
    """Seconds since the epoch."""
    ended: float | None = None
    """Seconds since the epoch; None while it runs, and if it died with its node."""
    why: str = ""
    """Why it ended."""
    is_crash: bool = False
    checkpoint: str = ""
    """The newest checkpoint at its end."""


@dataclass
class History:
    """All attempts of a run, in order."""

    attempts: list[Attempt] = field(default_factory=list)

    def begin(self, job_id: str, restart: int, nodes: str) -> int:
        """Adds an attempt; returns how many there were before it."""
        self.attempts.append(Attempt(job_id, restart, nodes, time.time()))
        return len(self.attempts) - 1

    def end(self, why: str, *, is_crash: bool, checkpoint: str) -> None:
        """Ends the newest attempt."""
        if not self.attempts:
            return  # Its file could not be read.
        last = self.attempts[-1]
        last.ended, last.why, last.is_crash, last.checkpoint = time.time(), why, is_crash, checkpoint

    def crashes(self, job_id: str) -> int:
        """Returns the number of crashes of a job."""
        return sum(attempt.is_crash for attempt in self.attempts if attempt.job_id == job_id)

    def restarts(self, job_id: str) -> int:
        """Returns how often a job had started the workers before its newest attempt."""
        return max(0, sum(attempt.job_id == job_id for attempt in self.attempts) - 1)

    def without_checkpoint(self, job_id: str, checkpoint: str) -> int:
        """Returns how many attempts of a job in a row, up to the newest, have left no new checkpoint.

        Args:
            job_id: the job.
            checkpoint: the newest checkpoint now; empty if there is none.
        """
        earlier = [attempt.checkpoint for attempt in self.attempts if attempt.job_id == job_id][:-1]
        # Any checkpoint counts as new for the job's first attempt, though it may be from before the job.
        checkpoints = ["", *earlier, checkpoint]
        before_and_after = reversed(list(itertools.pairwise(checkpoints)))
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], before_and_after))


def load(run_dir: Path) -> History:
    """Reads the history of a run; empty if there is none."""
    try:
        stored = load_json(Run(run_dir).history_file)
        return History([Attempt(**one) for one in stored["attempts"]])
    except (OSError, ValueError, TypeError, KeyError):
        return History()


def save(run_dir: Path, history: History) -> None:
    """Replaces the history of a run atomically."""
    replace_text(Run(run_dir).history_file, json.dumps(asdict(history), indent=1) + "\n")
