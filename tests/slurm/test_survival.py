"""Runs on a real cluster of two nodes go on after all that takes them off their nodes, and end when they are done."""

from __future__ import annotations

import json
import re
import time

import psutil
import pytest

pytestmark = pytest.mark.timeout(900)

SMALL = ("model=gpt2_nano", "model.params.n_layer=2", "data.seq_len=32", "train.batch_size=2", "train.log_every=1")
DEEPSPEED = (*SMALL, "trainer=deepspeed", "backend=ort", "train.steps=60", "launcher.grace_seconds=60")
PLAIN = (
    "model=mlp",
    "backend=eager",
    "trainer=ddp",
    # Long enough that whoever looks for a step finds the run still going on.
    "train.steps=400",
    "train.log_every=1",
    "train.checkpoint_every=10",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def undisturbed(slurm, folder):
    """A run of each kind to its end without any incident, made once."""
    made = {}

    def make(kind):
        if kind not in made:
            made[kind] = slurm.submit(folder, *kind, 'launcher.extra=["--hold"]')
        return made[kind]

    return make


def finish(slurm, job):
    """Lets a held job run to its end; SLURM itself forgets jobs after ten minutes."""
    if job.status != "unfinished":
        return job
    if not job.attempts:
        slurm("scontrol", "release", job.job_id)
    return job.wait_for_end()


def same_losses(job, reference):
    """Each step once, to the bit; steps that a lost node or a crash made again are the same again."""
    expected = {step: values[0] for step, values in reference.losses.items()}
    assert {step: values[0] for step, values in job.losses.items()} == expected
    assert all(len(set(values)) == 1 for values in job.losses.values())


def test_two_nodes_end_to_end(slurm, undisturbed, mlflow_run):
    job = undisturbed(DEEPSPEED)
    assert job.state == "PENDING"
    assert mlflow_run(job).data.tags["ortlaunch.state"] == "queued"
    finish(slurm, job)
    assert job.state == "COMPLETED", job.report
    run = mlflow_run(job)
    assert run.info.status == "FINISHED"
    tags = run.data.tags
    assert (tags["ortlaunch.state"], tags["ortlaunch.ort_active"]) == ("finished", "true")
    assert (tags["slurm.job_id"], tags["slurm.nodes"]) == (job.job_id, "node[1-2]")
    assert run.data.metrics["train/loss"] == job.losses[60][0]
    stored = json.loads((job.run_dir / "job.json").read_text())
    assert (stored["scheduler"], stored["job_id"]) == ("slurm", job.job_id)
    assert json.loads((job.run_dir / "done.json").read_text()) == {"step": 60}
    assert {path.stem for path in job.run_dir.glob("logs/torchrun-*.log")} == {"torchrun-0", "torchrun-1"}


def test_a_warning_costs_no_step(slurm, folder, undisturbed, mlflow_run):
    reference = finish(slurm, undisturbed(DEEPSPEED))
    job = slurm.submit(folder, *DEEPSPEED)
    job.wait_for_step(10)
    slurm.warn(job)
    job.wait_for_end()
    assert job.state == "COMPLETED", job.report
    same_losses(job, reference)
    assert all(len(values) == 1 for values in job.losses.values()), "a step was made twice"
    assert len(job.attempts) == 2
    run = mlflow_run(job)
    assert run.info.status == "FINISHED"
    assert run.data.tags["slurm.restart_count"] == "1"
    assert "warned" in run.data.tags["ortlaunch.requeue_reason"]
    assert [event["attempts"] for event in job.events if event["event"] == "requeue"] == [1]
    log = (job.run_dir / "logs" / "rank-0.log").read_text()
    assert re.search(rf"^--- attempt 2 on node[12] at \S+, job {job.job_id}$", log, re.MULTILINE)


def test_what_is_done_is_never_run_again(slurm, undisturbed):
    job = finish(slurm, undisturbed(DEEPSPEED))
    before = (job.events, job.attempts)
    slurm("scontrol", "requeue", job.job_id)
    job.wait_until(lambda: "Restarts=1" in slurm("scontrol", "show", "job", "-o", job.job_id), "restart")
    job.wait_for_end()
    assert job.state == "COMPLETED", job.report
    assert (job.events, job.attempts) == before
    assert f"{job.run_dir} is done" in (job.run_dir / "logs" / "slurm.log").read_text()


def test_a_requeue_by_hand(slurm, folder, undisturbed):
    reference = finish(slurm, undisturbed(PLAIN))
    job = slurm.submit(folder, *PLAIN)
    job.wait_for_step(15)
    slurm("scontrol", "requeue", job.job_id)
    job.wait_for_end()
    assert (job.state, job.status) == ("COMPLETED", "FINISHED"), job.report
    same_losses(job, reference)
    assert len(job.attempts) == 2


def test_a_lost_node(slurm, folder, undisturbed):
    from lab import boot, cut

    reference = finish(slurm, undisturbed(PLAIN))
    job = slurm.submit(folder, *PLAIN)
    job.wait_for_step(15)
    cut(slurm.lab, "node2")
    job.wait_until(lambda: job.attempts[0]["ended"] is not None or job.state == "PENDING", "end of the attempt")
    boot(slurm.lab, "node2")
    job.wait_for_end()
    slurm.wait_for_nodes()
    assert (job.state, job.status) == ("COMPLETED", "FINISHED"), job.report
    same_losses(job, reference)
    # On a busy machine the run is further when step 15 is seen, and a signal may have had time for a checkpoint.
    assert int(job.tags["ortlaunch.resumed_from"].rpartition("step-")[2]) >= 10


def worker_of(job, rank):
    """A worker's process as this machine sees it; its own number for itself is the node's."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        ours = "ortlaunch.worker" in words and str(job.run_dir) in words and "torch.distributed.run" not in words
        if ours and process.environ().get("RANK") == str(rank):
            return process
    raise AssertionError(f"no worker {rank}")


def test_a_crash_is_retried_as_often_as_asked(slurm, folder, undisturbed, mlflow_run):
    reference = finish(slurm, undisturbed(PLAIN))
    job = slurm.submit(folder, *PLAIN, "launcher.max_restarts=1")
    job.wait_for_step(15)
    worker_of(job, 1).kill()
    job.wait_until(lambda: len(job.attempts) == 2, "second attempt")
    job.wait_for_end()
    assert (job.state, job.status) == ("COMPLETED", "FINISHED"), job.report
    same_losses(job, reference)
    assert job.attempts[0]["is_crash"]
    assert "SIGKILL" in job.attempts[0]["why"] or "rank 1" in job.attempts[0]["why"], job.attempts[0]["why"]
    # On the same nodes, without a wait in the queue.
    assert job.attempts[1]["restart"] == 0


def test_a_crash_too_many_ends_the_run(slurm, folder, mlflow_run):
    job = slurm.submit(folder, *PLAIN)
    job.wait_for_step(5)
    victim = worker_of(job, 1)
    host = victim.environ()["SLURMD_NODENAME"]
    victim.kill()
    job.wait_for_end()
    assert (job.state, job.status) == ("FAILED", "FAILED"), job.report
    run = mlflow_run(job)
    assert run.info.status == "FAILED"
    assert run.data.tags["ortlaunch.state"] == "failed"
    assert f"rank 1 on {host}" in run.data.tags["ortlaunch.failure"]


def test_a_wrong_request_is_not_retried(slurm, folder):
    job = slurm.submit(folder, *SMALL, "model.params.vocab_size=100", "launcher.max_restarts=3", "backend=eager")
    job.wait_for_end()
    assert (job.state, job.status) == ("FAILED", "FAILED"), job.report
    assert "ExitCode=2:0" in slurm("scontrol", "show", "job", "-o", job.job_id)
    assert len(job.attempts) == 1
    assert "model.params.vocab_size" in job.tags.get("ortlaunch.failure", "") + str(job.events)


def test_a_persons_stop_is_final(slurm, folder, mlflow_run):
    job = slurm.submit(folder, *PLAIN, "train.steps=100000")
    job.wait_for_step(5)
    (job.run_dir / "STOP").write_text("cancel\n")
    # The scheduler's warning does not change a person's mind.
    slurm.warn(job)
    job.wait_for_end()
    assert job.status == "KILLED", job.report
    assert len(job.attempts) == 1
    assert job.tags["ortlaunch.resumable"] == "true"
    assert mlflow_run(job).info.status == "KILLED"


def test_scancel_ends_the_run_and_mlflow_hears_of_it(slurm, folder, mlflow_run):
    job = slurm.submit(folder, *PLAIN, "train.steps=100000")
    job.wait_for_step(5)
    slurm("scancel", job.job_id)
    job.wait_until(lambda: job.status != "unfinished", "end in the journal")
    job.wait_for_end()
    assert (job.state, job.status) == ("CANCELLED", "KILLED"), job.report
    assert job.tags["ortlaunch.resumable"] == "true"
    job.wait_until(lambda: mlflow_run(job).info.status == "KILLED", "end in MLflow")


def test_a_preempted_run_goes_on(slurm, folder, undisturbed):
    reference = finish(slurm, undisturbed(PLAIN))
    job = slurm.submit(folder, *PLAIN)
    job.wait_for_step(15)
    slurm("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--wrap=sleep 3", "--output=/dev/null")
    job.wait_until(lambda: len(job.attempts) == 2, "second attempt")
    job.wait_for_end()
    assert (job.state, job.status) == ("COMPLETED", "FINISHED"), job.report
    assert job.attempts[0]["why"] == "preempted"
    same_losses(job, reference)
    assert all(len(values) == 1 for values in job.losses.values()), "a step was made twice"


def test_a_time_limit(slurm, folder):
    """SLURM's own clock: it looks at time limits every 30 seconds only."""
    job = slurm.submit(folder, *PLAIN, "train.steps=100000", "launcher.time=2", "launcher.grace_seconds=40")
    job.wait_until(lambda: len(job.attempts) == 2, "second attempt")
    step = int(job.tags["ortlaunch.stopped_at_step"])
    job.wait_for_step(step + 3)
    (job.run_dir / "STOP").touch()
    job.wait_for_end()
    assert job.status == "KILLED", job.report
    assert job.attempts[0]["why"] == "the time limit is near"
    assert f"step-{step:08d}" in job.tags["ortlaunch.resumed_from"]
    assert all(len(values) == 1 for values in job.losses.values()), "a step was made twice"


def test_one_run_after_another(slurm, folder):
    first = slurm.submit(folder, *PLAIN, "train.steps=5", 'launcher.extra=["--hold"]')
    second = slurm.submit(folder, *PLAIN, "train.steps=5", f"launcher.dependency='afterok:{first.job_id}'")
    time.sleep(2)
    assert second.state == "PENDING"
    finish(slurm, first)
    second.wait_for_end()
    assert (first.status, second.status) == ("FINISHED", "FINISHED"), second.report
    assert second.attempts[0]["began"] > first.attempts[0]["ended"]
