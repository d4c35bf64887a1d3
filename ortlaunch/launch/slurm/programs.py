"""SLURM's programs: sbatch, scancel, squeue, sacct, scontrol and sinfo are called from here and from job.sh alone."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

_SECONDS = {"sbatch": 120, "scancel": 15, "squeue": 15, "sacct": 15, "scontrol": 20, "sinfo": 30}
"""Longest wait for an answer of each."""


@dataclass(frozen=True)
class Answer:
    """What a program has answered."""

    code: int = 0
    text: str = ""
    """Its standard output."""
    said: str = ""
    """Its standard error."""
    problem: str = ""
    """Why it could not be asked, in words; empty where it has answered, be it with an error."""

    @property
    def is_good(self) -> bool:
        """Whether it has done what it was asked."""
        return not self.problem and self.code == 0


def is_here(program: str) -> bool:
    """Whether a program is installed on this machine."""
    return shutil.which(program) is not None


def call(program: str, *words: str, text: str | None = None, environment: Mapping[str, str] | None = None) -> Answer:
    """Asks a program of SLURM's, for as long as `_SECONDS` says; raises nothing.

    Args:
        program: which.
        words: its arguments.
        text: its standard input.
        environment: its whole environment; by default this process's own, without what would change the answer's form.
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


def hostnames(node_list: str) -> list[str]:
    """The names that a list such as ``n[1-3]`` stands for; empty where scontrol does not answer."""
    return call("scontrol", "show", "hostnames", node_list).text.split()


def shown(job_id: str) -> list[str]:
    """What the controller shows of a job, a line for each task; empty if it does not answer or know it."""
    answer = call("scontrol", "show", "job", "--oneliner", job_id)
    return [line for line in answer.text.splitlines() if "JobState=" in line] if answer.is_good else []


def listed(layout: str, states: str | None = None) -> list[str]:
    """What sinfo lists of the cluster, each line once; empty where it does not answer.

    Args:
        layout: sinfo's ``--format``.
        states: of which nodes alone, as sinfo's ``--states``.
    """
    words = ["--noheader", f"--format={layout}", *([f"--states={states}"] if states else [])]
    lines = {line.strip() for line in call("sinfo", *words).text.splitlines()} - {"", "(null)", "0"}
    return sorted(lines)
