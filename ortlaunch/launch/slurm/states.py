"""Translates SLURM's states of jobs into those that all launchers share."""

from __future__ import annotations

import re

from ortlaunch.launch.jobs import End, Job, Jobs, Phase
from ortlaunch.launch.slurm import query

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


def words_for(reason: str) -> str:
    """Returns SLURM's reason why a job waits, in plain words if there are some."""
    head = reason.partition(",")[0].strip("()")
    if head in _REASONS:
        return _REASONS[head]
    if match := re.fullmatch(r"(QOS|Assoc)(Max|Grp)(.*)", head):
        owner = "its QOS" if match[1] == "QOS" else "its account"
        return f"{owner} is at its limit ({head})"
    return head


def translated(answer: query.Queue) -> Jobs:
    """Translates an answer of SLURM."""
    return Jobs({key: _job(job) for key, job in answer.jobs.items()}, answer.problem, answer.asked)


def _job(job: query.Job) -> Job:
    phase, end, reason = _phase_end_and_reason(job)
    return Job(
        job_id=job.job_id,
        phase=phase,
        reason=reason,
        waits_again=phase is Phase.WAITING and (job.restarts > 0 or job.state != "PENDING"),
        end=end,
        nodes=job.nodes,
        node_list=job.node_list,
        restarts=job.restarts,
        elapsed=job.elapsed,
        left=job.left,
        own_id=job.own_id,
    )


def _phase_end_and_reason(job: query.Job) -> tuple[Phase, End | None, str]:
    if job.state in _WAITING:
        return Phase.WAITING, None, words_for(job.reason)
    if job.state in _RUNNING:
        return Phase.RUNNING, None, _REMARKS.get(job.state, "")
    if job.state == "COMPLETING":
        return Phase.LEAVING, None, ""
    if job.state in _ENDS:
        return (Phase.ENDED, *_ENDS[job.state])
    if job.state == "CANCELLED":
        never = job.reason.startswith("DependencyNeverSatisfied")
        return Phase.ENDED, End.CANCELLED, "the run it waited for did not finish" if never else ""
    return Phase.ENDED, None, words_for(job.reason) if job.reason not in ("", "None", "NonZeroExitCode") else ""
