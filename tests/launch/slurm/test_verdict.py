"""What becomes of a job, case by case."""

from __future__ import annotations

import pytest

from ortlaunch.launch.queue.verdict import Facts, judge

WARNING, TERM = frozenset({"WARNING"}), frozenset({"TERM"})

CASES = {
    "done": (Facts(0, is_done=True), "end", "FINISHED"),
    "done, and a warning came late": (Facts(0, WARNING, is_done=True), "end", "FINISHED"),
    "done, and SLURM takes the nodes": (Facts(1, TERM, is_done=True, job_state="PENDING"), "end", "FINISHED"),
    "a warning and a common checkpoint": (Facts(0, WARNING, stopped_by="requeue"), "requeue", None),
    "a warning, and the workers did not make it": (
        Facts(138, WARNING | {"LATE"}, asked_by="requeue"),
        "requeue",
        None,
    ),
    "a person's stop": (Facts(0, stopped_by="cancel"), "end", "KILLED"),
    "a person's empty stop": (Facts(0, stopped_by=""), "end", "KILLED"),
    "a person's stop before a warning": (Facts(0, WARNING, stopped_by="cancel"), "end", "KILLED"),
    "a person's stop that was too late for a checkpoint": (Facts(1, WARNING, asked_by="cancel"), "end", "KILLED"),
    "a person's stop whose checkpoint cannot be written": (
        Facts(1, asked_by="cancel", has_failed=True),
        "end",
        "FAILED",
    ),
    "a person's stop that was too late, and whose workers fail because of each other": (
        Facts(1, WARNING | {"LATE"}, asked_by="cancel", has_failed=True),
        "end",
        "KILLED",
    ),
    "scancel": (Facts(0, TERM, stopped_by="signal", job_state="COMPLETING"), "end", "KILLED"),
    "scontrol requeue": (Facts(0, TERM, stopped_by="signal", job_state="COMPLETING", is_requeued=True), "left", None),
    "a lost node": (Facts(1, TERM, job_state="COMPLETING", is_requeued=True), "left", None),
    "SLURM does not answer": (Facts(1, TERM), "left", None),
    "notice of a preemption by SIGTERM": (
        Facts(0, stopped_by="signal", job_state="RUNNING", is_preempted=True),
        "requeue",
        None,
    ),
    "SIGTERM to everything": (Facts(0, TERM, stopped_by="signal", job_state="RUNNING"), "end", "KILLED"),
    "SIGTERM to the workers alone": (Facts(0, stopped_by="signal", job_state="RUNNING"), "again", None),
    "SIGTERM again and again": (
        Facts(0, stopped_by="signal", job_state="RUNNING", without_checkpoint=3),
        "end",
        "FAILED",
    ),
    "the limit without a warning": (Facts(1, TERM, job_state="COMPLETING"), "end", "KILLED"),
    "a crash": (Facts(1), "end", "FAILED"),
    "a crash that may be retried": (Facts(1, max_restarts=2, crashes=1), "again", None),
    "one crash too many": (Facts(1, max_restarts=2, crashes=2), "end", "FAILED"),
    "a wrong request": (Facts(1, is_request=True, max_restarts=2), "end", "FAILED"),
    "workers that end without a word": (Facts(0), "end", "FAILED"),
    "no progress between warnings": (Facts(0, WARNING, stopped_by="requeue", without_checkpoint=3), "end", "FAILED"),
    "little progress between warnings": (
        Facts(0, WARNING, stopped_by="requeue", without_checkpoint=2),
        "requeue",
        None,
    ),
    "a lost node that SLURM has not noticed": (Facts(1, frozenset({"LOST"})), "requeue", None),
    "a node that is lost again and again": (Facts(1, frozenset({"LOST"}), without_checkpoint=3), "end", "FAILED"),
    "SLURM requeued it in the meantime": (Facts(1, is_requeued=True, job_state="COMPLETING"), "left", None),
    "an unfit node": (Facts(1, frozenset({"UNFIT"}), max_restarts=0), "end", "FAILED"),
}


@pytest.mark.parametrize("case", CASES)
def test_judge(case):
    facts, action, status = CASES[case]
    verdict = judge(facts)
    assert (verdict.action, verdict.status) == (action, status), verdict


def test_exit_codes():
    assert judge(Facts(0, is_done=True)).code == 0
    assert judge(Facts(1)).code == 1
    assert judge(Facts(1, is_request=True)).code == 2
    assert judge(Facts(0, stopped_by="cancel")).code == 130
