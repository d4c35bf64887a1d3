"""Asks SLURM about a user's jobs: one squeue for all of them, one sacct for those that squeue no longer lists.

Both answers are kept for some seconds in the user's cache. So frequent queries from many terminals do not load the
controller. A cluster without slurmdbd has no sacct. The jobs that only sacct knows are then unknown.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ortlaunch.base.user import account_name, user_cache
from ortlaunch.launch.jobs import FRESH_SECONDS, Answer, whose_jobs
from ortlaunch.launch.slurm import programs
from ortlaunch.run.roots import keep

_MOST_ASKED = 500
_LONGEST_SECONDS = 200 * 86400.0
"""Longer limits count as none, because SLURM shows a job without a limit as one of 365 days."""

# The path (Command) comes last, because only it may contain the separator.
_QUEUE_FIELDS = (
    *("JobID", "ArrayJobID", "ArrayTaskID", "State", "RestartCnt", "NumNodes", "TimeUsed", "TimeLeft", "StartTime"),
    *("NodeList", "Reason", "Command"),
)
_ACCOUNT_FIELDS = ("JobID", "State", "NNodes", "ElapsedRaw", "NodeList")


@dataclass(frozen=True)
class Job:
    """One job, or one task of an array, as SLURM sees it."""

    job_id: str
    """``120``, or ``120_3`` for a task of an array."""
    state: str
    """SLURM's own word, such as PENDING."""
    reason: str = ""
    nodes: int = 0
    node_list: str = ""
    restarts: int = 0
    elapsed: float | None = None
    """Seconds since its latest start."""
    left: float | None = None
    """Seconds to the time limit; None without one."""
    starts: str = ""
    """When SLURM expects a pending job to start, in SLURM's format; empty if unknown."""
    command: str = ""
    own_id: str = ""
    """The separate job number that a task of an array gets when it starts."""


Queue = Answer[Job]
"""An answer of SLURM."""


def queue(max_age: float = FRESH_SECONDS) -> Queue:
    """Returns one user's jobs (see `whose_jobs`) in every state that the controller still remembers.

    Args:
        max_age: greatest age of a cached answer, in seconds; 0 always asks SLURM.
    """
    if not programs.is_here("squeue"):
        return Queue(problem="squeue is not installed on this machine")
    user = whose_jobs()
    layout = ",".join(f"{name}:|" for name in _QUEUE_FIELDS)
    words = ["--noheader", "--array", f"--user={user}", "--states=all", f"--Format={layout}"]
    return _cached(f"queue-{user}", max_age, lambda: _unless_hidden(user, _asked("squeue", words, _queued)))


def accounted(job_ids: Iterable[str], max_age: float = FRESH_SECONDS) -> Queue:
    """Returns jobs that the controller has forgotten, as the accounting database has them.

    Args:
        job_ids: ids in the form of `Job.job_id`.
        max_age: as for `queue`.
    """
    asked = sorted({job_id for job_id in job_ids if programs.is_job_id(job_id)})[:_MOST_ASKED]
    if not asked:
        return Queue()
    if not programs.is_here("sacct"):
        return Queue(problem="sacct is not installed on this machine")
    listed = ",".join(asked)
    # Without a start time, sacct leaves out jobs that ended before midnight.
    words = ["--noheader", "--parsable2", "--allocations", "--starttime=1970-01-01", f"--jobs={listed}"]
    words += [f"--format={','.join(_ACCOUNT_FIELDS)}"]
    key = hashlib.sha256(listed.encode()).hexdigest()[:16]
    return _cached(f"accounted-{key}", max_age, lambda: _asked("sacct", words, _accounted))


def seconds_of(text: str) -> float | None:
    """Returns the seconds of SLURM's time span ``[D-][HH:]MM:SS``; None if it is unlimited or unknown."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _asked(program: str, words: list[str], parse: Callable[[str], dict[str, Job]]) -> Queue:
    answer = programs.call(program, *words)
    if answer.problem:
        return Queue(problem=answer.problem)
    if answer.code:
        said = next(reversed(answer.said.strip().splitlines()), f"exit code {answer.code}")
        return Queue(problem=said if said.startswith(program) else f"{program}: {said}")
    return Queue(parse(answer.text))


def _unless_hidden(user: str, answer: Queue) -> Queue:
    """Returns an answer, or that there is none where SLURM may only keep another user's jobs from this one."""
    if answer.jobs or answer.problem or account_name() in (user, "root"):
        return answer
    settings = programs.call("scontrol", "show", "config").text
    if re.search(r"^PrivateData\s*=.*\bjobs\b", settings, re.MULTILINE) is None:
        return answer
    return Queue(problem=f"SLURM does not show the jobs of {user} to {account_name()} (PrivateData=jobs)")


def _queued(text: str) -> dict[str, Job]:
    jobs = {}
    for line in text.splitlines():
        values = dict(zip(_QUEUE_FIELDS, line.rstrip("\n").split("|", len(_QUEUE_FIELDS) - 1), strict=False))
        if len(values) < len(_QUEUE_FIELDS):
            continue
        is_task = values["ArrayTaskID"].isdecimal()
        job_id = f"{values['ArrayJobID']}_{values['ArrayTaskID']}" if is_task else values["JobID"]
        left = seconds_of(values["TimeLeft"])
        jobs[job_id] = Job(
            job_id=job_id,
            state=values["State"],
            reason="" if values["Reason"] == "None" else values["Reason"],
            nodes=_number(values["NumNodes"]),
            node_list=values["NodeList"],
            restarts=_number(values["RestartCnt"]),
            elapsed=seconds_of(values["TimeUsed"]),
            left=left if left is not None and left < _LONGEST_SECONDS else None,
            starts="" if values["StartTime"] in ("N/A", "Unknown") else values["StartTime"],
            command=values["Command"].rstrip("|"),
            own_id=values["JobID"] if is_task else "",
        )
    return jobs


def _accounted(text: str) -> dict[str, Job]:
    jobs = {}
    for line in text.splitlines():
        job_id, state, nodes, elapsed, node_list = [*line.split("|"), "", "", "", ""][:5]
        # The state may be "CANCELLED by 1000". A requeued job has several rows with one id, and the latest comes last.
        jobs[job_id] = Job(
            job_id=job_id,
            state=state.partition(" ")[0],
            nodes=_number(nodes),
            node_list=node_list,
            elapsed=float(elapsed) if elapsed.isdecimal() else None,
        )
    return jobs


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _cached(name: str, max_age: float, ask: Callable[[], Queue]) -> Queue:
    # Another configuration file means another cluster, which has its own cache file.
    cluster = hashlib.sha256(os.environ.get("SLURM_CONF", "").encode()).hexdigest()[:8]
    path = user_cache() / "slurm" / f"{name}-{cluster}.json"
    if max_age > 0 and (kept := _read(path, max_age)) is not None:
        return kept
    begun = time.time()
    answer = dataclasses.replace(ask(), asked=begun)
    content = {"time": begun, "problem": answer.problem, "jobs": [asdict(job) for job in answer.jobs.values()]}
    keep(path, json.dumps(content))
    return answer


def _read(path: Any, max_age: float) -> Queue | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not 0 <= time.time() - content["time"] < max_age:
            return None
        jobs = [Job(**job) for job in content["jobs"]]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return Queue({job.job_id: job for job in jobs}, content["problem"], content["time"])
