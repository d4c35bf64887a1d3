"""The attempts of a run on the cluster, ``history.json`` in its folder: how often, where, and why each ended."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ortlaunch.base.files import replace_text
from ortlaunch.run.run import Run


@dataclass
class Attempt:
    """One time that the workers were started."""

    job_id: str
    restart: int
    """How often the scheduler had restarted the job."""
    nodes: str
    began: float
    """Seconds since the epoch."""
    ended: float | None = None
    """None while it runs, and for one that died with its node."""
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
        """The newest attempt is over."""
        last = self.attempts[-1]
        last.ended, last.why, last.is_crash, last.checkpoint = time.time(), why, is_crash, checkpoint

    def crashes(self, job_id: str) -> int:
        """Crashes of a job."""
        return sum(attempt.is_crash for attempt in self.attempts if attempt.job_id == job_id)

    def barren(self, job_id: str, checkpoint: str) -> int:
        """Attempts of a job, up to the newest, that left nothing new behind, if the newest leaves `checkpoint`."""
        count, after = 0, checkpoint
        for attempt in reversed([one for one in self.attempts if one.job_id == job_id][:-1]):
            if attempt.checkpoint != after:
                return count
            count += 1
        # The job's first attempt: it began with nothing, or with what was there when it was submitted.
        return count + (after == "")


def load(run_dir: Path) -> History:
    """Reads it; empty where there is none."""
    try:
        stored = json.loads(Run(run_dir).history_file.read_text())
        return History([Attempt(**one) for one in stored["attempts"]])
    except (OSError, ValueError, TypeError, KeyError):
        return History()


def save(run_dir: Path, history: History) -> None:
    """Replaces it in one step."""
    replace_text(Run(run_dir).history_file, json.dumps(asdict(history), indent=1) + "\n")
