"""A script of a user's own on a real cluster of two nodes: preempted, queued again, and the same run in the end."""

from __future__ import annotations

import pytest

from tests.support.scripts import alone, write_loop

pytestmark = pytest.mark.timeout(900)


def test_a_loop_that_is_warned_twice_ends_with_the_losses_of_an_undisturbed_one(slurm, tmp_path, mlflow_run):
    write_loop(tmp_path)
    words = ("launcher.grace_seconds=60", "--", "train.py", "--lr", "0.05", "--steps", "10", "--wait", "4", "7")
    job = slurm.submit(tmp_path, *words)
    for attempt, step in ((1, 4), (2, 7)):
        log = job.run_dir / "logs" / "rank-0.log"
        job.wait_until(lambda: log.is_file() and f"step {step}\n" in log.read_text(), f"step {step}")  # noqa: B023
        slurm.warn(job)
        job.wait_until(lambda: len(job.attempts) == attempt + 1, f"attempt {attempt + 1}")  # noqa: B023
    job.wait_for_end()
    assert (job.state, job.status) == ("COMPLETED", "FINISHED"), job.report
    losses = {step: values["loss"] for step, values in metrics(job) if "loss" in values}
    assert losses == {step: pytest.approx(loss, rel=1e-6) for step, loss in enumerate(alone(0.05, 10))}
    run = mlflow_run(job)
    assert (run.info.status, run.data.params["args.lr"]) == ("FINISHED", "0.05")
    assert run.data.metrics["loss"] == losses[9]


def metrics(job):
    """Steps and figures of the journal in their order."""
    return [(event["step"], event["values"]) for event in job.events if event["event"] == "metrics"]
