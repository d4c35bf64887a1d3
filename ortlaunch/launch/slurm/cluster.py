"""What SLURM says of jobs: squeue for all of a user, sacct for those that squeue no longer lists, scontrol for one job.

An answer is reused for some seconds. A cluster without slurmdbd has no sacct. The jobs that only sacct knows are then
unknown.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Callable, Iterable

from ortlaunch.base.user import account_name
from ortlaunch.launch.jobs import FRESH_SECONDS, End, Job, Jobs, Phase, whose_jobs
from ortlaunch.launch.queue.own import OwnState
from ortlaunch.launch.slurm import programs

_MOST_ASKED = 500
_MOST_KEPT = 32
_LONGEST_SECONDS = 200 * 86400.0
"""Longer limits count as none, because SLURM shows a job without a limit as one of 365 days."""

_QUEUE_FIELDS = (
    *("JobID", "ArrayJobID", "ArrayTaskID", "State", "RestartCnt", "NumNodes", "TimeUsed", "TimeLeft", "NodeList"),
    "Reason",
)
_ACCOUNT_FIELDS = ("JobID", "State", "NNodes", "ElapsedRaw", "NodeList")
_ALIVE = ("PENDING", "RUNNING", "REQUEUED", "COMPLETING", "CONFIGURING", "SUSPENDED")
"""States of a job that waits or runs."""
_REASONS = {
    "Priority": "jobs of higher priority come first",
    "Resources": "waits for free nodes",
    "Dependency": "waits for another job",
    "DependencyNeverSatisfied": "the job that it waits for has failed: it will never start",
    "JobArrayTaskLimit": "its sweep is at launcher.array_limit",
    "JobHeldUser": "held by you",
    "JobHeldAdmin": "held by an administrator",
    "BeginTime": "waits for its start time",
    "Reservation": "waits for its reservation",
    "Licenses": "waits for a license",
    "ReqNodeNotAvail": "a node that it asked for is not available",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition takes no jobs",
    "PartitionNodeLimit": "more nodes than the partition allows",
    "PartitionTimeLimit": "more time than the partition allows",
    "BadConstraints": "no node meets its constraints",
    "NodeDown": "a node that it asked for is down",
    "Cleaning": "its nodes are still being cleaned up from its last start",
    "launch failed requeued held": "could not be started on its node, and is held",
}
_WAITING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_RUNNING = ("RUNNING", "CONFIGURING", "SIGNALING", "STAGE_OUT", "RESIZING", "SUSPENDED", "STOPPED")
_ENDS = {
    "TIMEOUT": (End.KILLED, "its time limit"),
    "DEADLINE": (End.KILLED, "its deadline"),
    "NODE_FAIL": (End.KILLED, "a node failed"),
    "BOOT_FAIL": (End.KILLED, "a node did not boot"),
    "OUT_OF_MEMORY": (End.FAILED, "out of memory on a node"),
    "PREEMPTED": (End.PREEMPTED, "another job took its nodes"),
    "REVOKED": (End.KILLED, "another cluster took it"),
}
_REMARKS = {
    "SUSPENDED": "suspended by SLURM",
    "STOPPED": "suspended by SLURM",
    "CONFIGURING": "its nodes boot",
}


_answers: dict[tuple[str, ...], Jobs] = {}
"""The latest answers, by what was asked."""


def queue(max_age: float = FRESH_SECONDS) -> Jobs:
    """Returns one user's jobs (see `whose_jobs`) in every state that the controller still remembers.

    Args:
        max_age: greatest age of a kept answer, in seconds; 0 always asks SLURM.
    """
    user = whose_jobs()
    layout = ",".join(f"{name}:|" for name in _QUEUE_FIELDS)
    words = ["--noheader", "--array", f"--user={user}", "--states=all", f"--Format={layout}"]
    return _kept(["squeue", *words], max_age, lambda: _unless_hidden(user, _asked("squeue", words, _queued)))


def accounted(job_ids: Iterable[str], max_age: float = FRESH_SECONDS) -> Jobs:
    """Returns jobs that the controller has forgotten, as the accounting database has them.

    Args:
        job_ids: ids in the form of `Job.job_id`.
        max_age: as for `queue`.
    """
    asked = sorted({job_id for job_id in job_ids if programs.is_job_id(job_id)})[:_MOST_ASKED]
    if not asked:
        return Jobs()
    # Without a start time, sacct leaves out jobs that ended before midnight.
    words = ["--noheader", "--parsable2", "--allocations", "--starttime=1970-01-01", f"--jobs={','.join(asked)}"]
    words += [f"--format={','.join(_ACCOUNT_FIELDS)}"]
    return _kept(["sacct", *words], max_age, lambda: _asked("sacct", words, _accounted))


def own_job() -> str:
    """Returns the id of the job that this process runs in, as SLURM's commands take it.

    A task of an array is named ARRAY_TASK, because the job id of the last task is also that of the whole array.
    """
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ["SLURM_JOB_ID"]


def job_state(job_id: str) -> OwnState | None:
    """Asks the controller for a job's state; returns None if it does not answer or does not know the job."""
    lines = programs.shown(job_id)
    if not lines:
        return None
    # The id of an array shows all its tasks, and it is also the job id of the last one.
    text = next((line for line in lines if line.startswith(f"JobId={job_id} ")), lines[0])
    restarts = re.search(r"\bRestarts=(\d+)", text)
    preempted = re.search(r"\bPreemptTime=(\S+)", text)
    is_preempted = preempted is not None and preempted[1] != "None"
    return OwnState(_state(text), int(restarts[1]) if restarts else 0, is_preempted, _seconds_left(text))


def is_alive(job_id: str) -> bool:
    """Returns whether a job, or any task of an array, waits or runs; true if SLURM does not answer."""
    lines = programs.shown(job_id)
    return not lines or any(is_alive_in(_state(text)) for text in lines)


def is_alive_in(state: str) -> bool:
    """Returns whether a job in one of SLURM's states waits or runs."""
    return state in _ALIVE


def _seconds_left(text: str) -> float:
    end = re.search(r"\bEndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", text)
    return time.mktime(time.strptime(end[1], "%Y-%m-%dT%H:%M:%S")) - time.time() if end else float("inf")


def _state(text: str) -> str:
    found = re.search(r"\bJobState=(\S+)", text)
    return found[1] if found else ""


def words_for(reason: str) -> str:
    """Returns SLURM's reason why a job waits, in plain words if there are some."""
    head = reason.partition(",")[0].strip("()")
    if head in _REASONS:
        return _REASONS[head]
    if match := re.fullmatch(r"(QOS|Assoc)(Max|Grp)(.*)", head):
        owner = "its QOS" if match[1] == "QOS" else "its account"
        return f"{owner} is at its limit ({head})"
    return head


def seconds_of(text: str) -> float | None:
    """Returns the seconds of SLURM's time span ``[D-][HH:]MM:SS``; None if it is unlimited or unknown."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _asked(program: str, words: list[str], parse: Callable[[str], list[Job]]) -> Jobs:
    if not programs.is_here(program):
        return Jobs(problem=f"{program} is not installed on this machine")
    answer = programs.call(program, *words)
    if answer.problem:
        return Jobs(problem=answer.problem)
    if answer.code:
        said = next(reversed(answer.said.strip().splitlines()), f"exit code {answer.code}")
        return Jobs(problem=said if said.startswith(program) else f"{program}: {said}")
    return Jobs({job.job_id: job for job in parse(answer.text)})


def _unless_hidden(user: str, answer: Jobs) -> Jobs:
    """Returns an answer, or that there is none where SLURM may only keep another user's jobs from this one."""
    if answer.jobs or answer.problem or account_name() in (user, "root"):
        return answer
    settings = programs.call("scontrol", "show", "config").text
    if re.search(r"^PrivateData\s*=.*\bjobs\b", settings, re.MULTILINE) is None:
        return answer
    return Jobs(problem=f"SLURM does not show the jobs of {user} to {account_name()} (PrivateData=jobs)")


def _queued(text: str) -> list[Job]:
    jobs = []
    for line in text.splitlines():
        values = dict(zip(_QUEUE_FIELDS, line.rstrip("\n").split("|", len(_QUEUE_FIELDS) - 1), strict=False))
        if len(values) < len(_QUEUE_FIELDS):
            continue
        is_task = values["ArrayTaskID"].isdecimal()
        state, restarts, left = values["State"], _number(values["RestartCnt"]), seconds_of(values["TimeLeft"])
        reason = values["Reason"].rstrip("|")
        phase, end, why = _phase_end_and_reason(state, "" if reason == "None" else reason)
        jobs.append(
            Job(
                job_id=f"{values['ArrayJobID']}_{values['ArrayTaskID']}" if is_task else values["JobID"],
                phase=phase,
                reason=why,
                waits_again=phase is Phase.WAITING and (restarts > 0 or state != "PENDING"),
                end=end,
                nodes=_number(values["NumNodes"]),
                node_list=values["NodeList"],
                restarts=restarts,
                elapsed=seconds_of(values["TimeUsed"]),
                left=left if left is not None and left < _LONGEST_SECONDS else None,
                own_id=values["JobID"] if is_task else "",
            )
        )
    return jobs


def _accounted(text: str) -> list[Job]:
    jobs = []
    for line in text.splitlines():
        job_id, state, nodes, elapsed, node_list = [*line.split("|"), "", "", "", ""][:5]
        # The state may be "CANCELLED by 1000". A requeued job has several rows with one id, and the latest comes last.
        state = state.partition(" ")[0]
        phase, end, why = _phase_end_and_reason(state, "")
        jobs.append(
            Job(
                job_id=job_id,
                phase=phase,
                reason=why,
                waits_again=phase is Phase.WAITING and state != "PENDING",
                end=end,
                nodes=_number(nodes),
                node_list=node_list,
                elapsed=float(elapsed) if elapsed.isdecimal() else None,
            )
        )
    return jobs


def _phase_end_and_reason(state: str, said: str) -> tuple[Phase, End | None, str]:
    if state in _WAITING:
        return Phase.WAITING, None, words_for(said)
    if state in _RUNNING:
        return Phase.RUNNING, None, _REMARKS.get(state, "")
    if state == "COMPLETING":
        return Phase.LEAVING, None, ""
    if state in _ENDS:
        return (Phase.ENDED, *_ENDS[state])
    if state == "CANCELLED":
        never = said.startswith("DependencyNeverSatisfied")
        return Phase.ENDED, End.CANCELLED, "the run it waited for did not finish" if never else ""
    return Phase.ENDED, None, words_for(said) if said not in ("", "None", "NonZeroExitCode") else ""


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _kept(command: list[str], max_age: float, ask: Callable[[], Jobs]) -> Jobs:
    # Another configuration file means another cluster.
    key, now = (*command, os.environ.get("SLURM_CONF", ""), os.environ.get("PATH", "")), time.time()
    known = _answers.get(key)
    if known is not None and 0 <= now - known.asked < max_age:
        return known
    if len(_answers) >= _MOST_KEPT:
        _answers.clear()
    _answers[key] = answer = dataclasses.replace(ask(), asked=now)
    return answer
