"""Calls SLURM's programs: sbatch, scancel, squeue, sacct, scontrol and sinfo. Only job.sh calls them elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from ortlaunch.base.errors import RequestError

_SECONDS = {"sbatch": 120, "scancel": 15, "squeue": 15, "sacct": 15, "scontrol": 20, "sinfo": 30}
"""Longest wait for the answer of each program, in seconds."""


_JOB_ID = re.compile(r"[0-9]{1,18}(?:_(?:[0-9]{1,9}|\[[0-9,%-]+\])|\+[0-9]{1,9})?")
_LONGEST_JOB_ID = 256


@dataclass(frozen=True)
class Answer:
    """The answer of a program."""

    code: int = 0
    text: str = ""
    """Its standard output."""
    said: str = ""
    """Its standard error."""
    problem: str = ""
    """Why the program could not be called; empty if it has answered, even with an error."""

    @property
    def is_good(self) -> bool:
        """Whether the program has succeeded."""
        return not self.problem and self.code == 0


def is_here(program: str) -> bool:
    """Returns whether a program is installed on this machine."""
    return shutil.which(program) is not None


def call(program: str, *words: str, text: str | None = None, environment: Mapping[str, str] | None = None) -> Answer:
    """Calls a program of SLURM and waits at most `_SECONDS` for its answer; raises nothing.

    Args:
        program: its name.
        words: its arguments.
        text: its standard input.
        environment: its whole environment; by default that of this process, without variables that would change the
            format of the answer.
    """
    if environment is None:
        changes = ("SQUEUE_", "SACCT_", "SINFO_", "SLURM_TIME_FORMAT")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(changes)}
    try:
        done = subprocess.run(
            [program, *words],
            input=text,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS[program],
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(problem=f"{program} gave no answer within {_SECONDS[program]} s")
    except OSError as error:
        return Answer(problem=f"{program}: {error}")
    return Answer(done.returncode, done.stdout, done.stderr)


def is_job_id(text: str) -> bool:
    """Returns whether a text is a job id of SLURM: ``120``, ``120_3`` for a task of an array, ``120+1`` for a part.

    An id comes from a run folder. SLURM's programs would take other texts for an option, or for several jobs.
    """
    return _JOB_ID.fullmatch(text[:_LONGEST_JOB_ID]) is not None


def check_job_id(text: str) -> None:
    """Refuses what is no job id.

    Raises:
        RequestError: it is none.
    """
    if not is_job_id(text):
        raise RequestError(f"{text[:40]!r} is no job id of SLURM: the run's job.json is damaged, or another user's")


def hostnames(node_list: str) -> list[str]:
    """Returns the names of a list such as ``n[1-3]``; empty if scontrol does not answer."""
    return call("scontrol", "show", "hostnames", node_list).text.split()


def shown(job_id: str) -> list[str]:
    """Returns the controller's lines about a job, one per task; empty if it does not answer or know the job."""
    if not is_job_id(job_id):
        return []
    answer = call("scontrol", "show", "job", "--oneliner", job_id)
    return [line for line in answer.text.splitlines() if "JobState=" in line] if answer.is_good else []


def listed(layout: str, states: str | None = None) -> list[str]:
    """Returns what sinfo lists of the cluster, each line once; empty if it does not answer.

    Args:
        layout: sinfo's ``--format``.
        states: states of the nodes to list, as for sinfo's ``--states``; None lists all nodes.
    """
    words = ["--noheader", f"--format={layout}", *([f"--states={states}"] if states else [])]
    lines = {line.strip() for line in call("sinfo", *words).text.splitlines()} - {"", "(null)", "0"}
    return sorted(lines)
