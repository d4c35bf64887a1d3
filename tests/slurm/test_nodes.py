"""What the nodes find out before they train, and how little of the cluster a run needs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from contextlib import contextmanager

import psutil
import pytest

pytestmark = pytest.mark.timeout(900)

PLAIN = ("model=mlp", "backend=eager", "trainer=ddp", "train.steps=5", "train.log_every=1", "tracking=none")


@contextmanager
def inside(slurm, node, *command, undo):
    """Runs a command in a node's own view of the file system, and another one afterwards."""
    identity = json.loads((slurm.lab.folder / "run" / f"{node}.json").read_text())
    (first,) = psutil.Process(identity["pid"]).children()
    enter = ["nsenter", "--target", str(first.pid), "--mount", "--pid"]
    subprocess.run([*enter, *command], check=True, timeout=30)
    try:
        yield
    finally:
        subprocess.run([*enter, *undo], check=True, timeout=30)


def reasons(job):
    """Why the attempts ended."""
    return "\n".join(attempt["why"] for attempt in job.attempts)


def test_a_node_without_the_run_folder_is_named(slurm, tmp_path):
    job = slurm.submit(tmp_path, *PLAIN, 'launcher.extra=["--hold"]')
    with inside(slurm, "node2", "mount", "-t", "tmpfs", "none", str(tmp_path), undo=("umount", str(tmp_path))):
        slurm("scontrol", "release", job.job_id)
        job.wait_for_end()
    assert (job.state, job.status) == ("FAILED", "FAILED"), job.report
    assert "node2: did not answer" in job.events[-3]["message"], job.report
    log = (job.run_dir / "logs" / "slurm.log").read_text()
    assert f"node2: the run folder {job.run_dir} cannot be used here" in log
    assert "node1" not in job.events[-3]["message"]
    assert not job.losses


def test_a_folder_of_the_same_name_is_not_the_run_folder(slurm, tmp_path):
    """Two disks mounted under one name: the node sees all files, and not those of the first node."""
    job = slurm.submit(tmp_path, *PLAIN, 'launcher.extra=["--hold"]')
    subprocess.run(["cp", "-a", job.run_dir, tmp_path / "copy"], check=True)
    bind = ("mount", "--bind", str(tmp_path / "copy"), str(job.run_dir))
    with inside(slurm, "node2", *bind, undo=("umount", str(job.run_dir))):
        slurm("scontrol", "release", job.job_id)
        job.wait_for_end()
    assert job.state == "FAILED", job.report
    assert "is not the run folder that the first node sees" in (job.run_dir / "logs" / "slurm.log").read_text()


def test_a_node_that_does_not_answer_is_named(slurm, tmp_path):
    job = slurm.submit(tmp_path, *PLAIN, 'launcher.extra=["--hold"]', "launcher.preflight_seconds=8")
    # Whoever opens it waits for ever.
    os.mkfifo(tmp_path / "fifo")
    record = str(job.run_dir / "env.json")
    with inside(slurm, "node2", "mount", "--bind", str(tmp_path / "fifo"), record, undo=("umount", "--lazy", record)):
        slurm("scontrol", "release", job.job_id)
        job.wait_until(lambda: bool(job.attempts) and job.attempts[0]["ended"] is not None, "end of the first attempt")
    # Elsewhere, or when the node is well again.
    job.wait_for_end()
    assert job.status == "FINISHED", job.report
    assert "lost a node: node2: did not answer within launcher.preflight_seconds" in job.attempts[0]["why"], job.report
    assert "node2" in job.tags["ortlaunch.requeue_reason"]
    assert "timeout --kill-after=5 8 " in (job.run_dir / "sbatch.sh").read_text()


def test_without_it_nothing_is_asked(slurm, tmp_path):
    job = slurm.submit(tmp_path, *PLAIN, "launcher.preflight=false").wait_for_end()
    assert job.state == "COMPLETED", job.report
    assert not (job.run_dir / "preflight").exists()


_OF_THE_NODES = ("NODE_REGISTRATION", "EPILOG", "PING", "COMPLETE_BATCH", "STEP_COMPLETE", "COMPLETE_PROLOG")


def calls(slurm):
    """How often the controller was called since the last reset, by what was asked; not what its nodes report."""
    text = slurm("sdiag").partition("by message type")[2].partition("by user")[0]
    counts = {name: int(count) for name, count in re.findall(r"(\w+)\s+\(\s*\d+\) count:(\d+)", text)}
    return {name: count for name, count in counts.items() if not any(word in name for word in _OF_THE_NODES)}


def test_the_controller_hears_no_more_of_two_nodes_than_of_one(slurm, tmp_path):
    seen = {}
    for nodes in (1, 2):
        slurm("sdiag", "--reset")
        before = calls(slurm)
        job = slurm.submit(tmp_path, *PLAIN, f"launcher.nodes={nodes}")
        submitted = calls(slurm)
        # Without looking: that would count too.
        deadline = time.monotonic() + 200
        while job.status == "unfinished" and time.monotonic() < deadline:
            time.sleep(0.5)
        time.sleep(2)
        seen[nodes] = (submitted, calls(slurm))
        assert job.status == "FINISHED", job.report
        assert submitted.get("REQUEST_SUBMIT_BATCH_JOB") == 1, (before, submitted)
    asked = {nodes: sum(after.values()) for nodes, (_, after) in seen.items()}
    assert asked[2] <= asked[1], seen
    assert asked[2] < 25, seen


def test_a_folder_with_a_nasty_name(slurm, tmp_path):
    cwd = tmp_path / "a b'c\"d$(touch pwned)\n%j\\ü"
    cwd.mkdir()
    job = slurm.submit(cwd, *PLAIN, "name='Zoë \"quoted\" $HOME'")
    job.wait_for_end()
    assert (job.state, job.status) == ("COMPLETED", "FINISHED"), job.report
    assert job.run_dir.is_relative_to(cwd)
    assert "--- job" in (job.run_dir / "logs" / "slurm.log").read_text()
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ("launcher.partition=nowhere",),
            "launcher.partition=nowhere: the cluster has no such partition (there are debug",
        ),
        (("launcher.nodes=3",), "no nodes of the cluster are like this: launcher.nodes=3"),
        (("launcher.gpus_per_node=9", "launcher.workers_per_node=1"), "launcher.gpus_per_node=9"),
        (("launcher.constraint=moon",), "launcher.constraint=moon"),
        (("launcher.dependency='afterok:999999'", "launcher.partition=nowhere"), "launcher.partition=nowhere"),
    ],
)
def test_what_the_cluster_refuses_leaves_nothing_behind(slurm, tmp_path, overrides, words):
    done = slurm.run(tmp_path, "launcher=slurm", *PLAIN, *overrides)
    assert done.returncode == 2
    assert words in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_nodes_that_are_down_are_waited_for(slurm, tmp_path):
    slurm("scontrol", "update", "NodeName=node2", "State=DRAIN", "Reason=test")
    try:
        job = slurm.submit(tmp_path, *PLAIN)
        assert "warning" in job.said
        assert job.state == "PENDING"
    finally:
        slurm("scontrol", "update", "NodeName=node2", "State=RESUME")
    job.wait_for_end()
    assert job.status == "FINISHED", job.report


def test_the_pretended_gpus_are_handed_out(slurm, tmp_path):
    """Their number is the job's; training on them is not possible, so the workers stay on the CPU."""
    job = slurm.submit(tmp_path, *PLAIN, "launcher.gpus_per_node=2", "device=cpu")
    assert "#SBATCH --gpus-per-node=2" in (job.run_dir / "sbatch.sh").read_text()
    job.wait_for_end()
    assert job.status == "FINISHED", job.report
