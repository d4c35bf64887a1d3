"""Runs that an earlier version has made go on under this one, and their checkpoints and weights serve new runs."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest
import torch
from mlflow import MlflowClient
from safetensors.torch import load_file

from tests.support.cli import ortlaunch
from tests.support.runs import Recorded
from tests.support.servers import points
from tests.support.stored import Stored, unpack

# What a version of torch writes need not be for those before it.
pytestmark = pytest.mark.skipif(torch.__version__ < (2, 13), reason="the stored checkpoints are of torch 2.13")

SAME = ("model=factory", "model.target=nets:Net", "data=digits", "train.log_every=1", "train.steps=6", "tracking=none")
EAGER = ("backend=eager",)
KINDS = {
    "single": (*EAGER, "trainer=single"),
    "ddp": EAGER,
    "ddp-ort": ("backend=ort",),
    **{f"zero{stage}": (*EAGER, "trainer=deepspeed", f"trainer.zero_stage={stage}") for stage in range(4)},
}
GOES_ON = {"stopped": "ddp", "requeued": "job", "task-lr=0.001": "factory-eager-single-lr=0.001"}
"""What is not over, and a run that is and computes the same."""
SECONDS = 240


class Kept(Recorded):
    """A stored run."""

    def __init__(self, stored: Stored, name: str) -> None:
        self._run_dir = stored.run(name)

    @property
    def run_dir(self):
        return self._run_dir


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    return unpack(tmp_path_factory.mktemp("stored"))


@pytest.fixture(scope="module")
def mlflow_ids(stored):
    """Of the runs that are not over, before they go on."""
    relays = {name: json.loads((stored.run(name) / "relay.json").read_text()) for name in GOES_ON}
    return {name: relay["mlflow_run_id"] for name, relay in relays.items()}


@pytest.fixture(scope="module")
def resumed(start, stored, mlflow_ids):
    """`ortlaunch resume` of the stopped run; beside it the job that was queued again and one that waited begin."""
    (sweep,) = stored.work.glob("runs/cluster/multirun-*")
    jobs = {
        103: stored.start_job(stored.run("requeued"), 103, restart=1),
        105: stored.start_job(sweep, 105, SLURM_ARRAY_JOB_ID="104", SLURM_ARRAY_TASK_ID="0"),
    }
    try:
        result = start(stored.work, "resume", str(stored.run("stopped"))).finish()
        for job_id, job in jobs.items():
            assert job.wait(SECONDS) == 0, stored.job_output(job_id).read_text()
    finally:
        for job in jobs.values():
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
    return result


def figures(run: Recorded, after: int = 0) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step, after a step."""
    norms = run.series("train/grad_norm")
    return {step: (loss, norms[step]) for step, loss in run.losses.items() if step > after}


def expected(run: Recorded, after: int = 0) -> dict[int, object]:
    """The same to compare with: another processor computes a little differently."""
    return {step: pytest.approx(values, rel=1e-3) for step, values in figures(run, after).items()}


@pytest.mark.parametrize("name", GOES_ON)
def test_a_run_goes_on_to_its_end_as_the_same_mlflow_run(stored, mlflow_ids, resumed, name):
    assert resumed.returncode == 0, resumed.report
    run = Kept(stored, name)
    assert run.status == "FINISHED"
    whole = Kept(stored, GOES_ON[name])
    assert list(figures(whole)) == [1, 2, 3, 4, 5, 6]
    assert figures(run) == expected(whole)
    client = MlflowClient(f"sqlite:///{stored.work}/mlruns.db")
    recorded = client.get_run(mlflow_ids[name])
    assert (recorded.data.tags["ortlaunch.run_dir"], recorded.info.status) == (str(run.run_dir), "FINISHED")
    assert sorted(points(client, recorded).elements()) == sorted(run.points)


def test_nothing_is_trained_again(stored, resumed):
    assert re.search(r"after step [1-5]\b", resumed.stdout), resumed.report
    for name in ("stopped", "requeued"):
        trained = [event["step"] for event in Kept(stored, name).events if "train/loss" in event.get("values", {})]
        assert trained == [1, 2, 3, 4, 5, 6]


# Those of the first stages are files as the second one's.
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.nightly] * (kind in ("zero0", "zero1"))) for kind in KINDS]
)
def test_a_checkpoint_of_each_kind_can_be_started_from(train, stored, kind):
    whole = Kept(stored, kind)
    middle = whole.run_dir / "checkpoints" / "step-00000004"
    rest = train(stored.work, *SAME, *KINDS[kind], f"train.resume={middle}")
    assert rest.status == "FINISHED", rest.report
    assert f"going on from {middle}" in rest.stdout
    assert list(figures(rest)) == [5, 6]
    assert figures(rest) == expected(whole, after=4)


def test_weights_serve_another_run(train, stored):
    """One that learns next to nothing leaves what it began with."""
    weights = stored.run("ddp") / "weights" / "model.safetensors"
    run = train(stored.work, *SAME, *EAGER, "train.steps=1", "optimizer.lr=1e-9", f"model.weights={weights}")
    assert run.status == "FINISHED", run.report
    left = load_file(run.run_dir / "weights" / "model.safetensors")
    torch.testing.assert_close(left, load_file(weights))


def test_weights_are_exported_from_a_checkpoint(stored):
    """Of ZeRO 3, whose checkpoint has them in pieces."""
    done = ortlaunch(stored.work, "export", "weights", "zero3", "--out", "weights", **stored.variables)
    assert done.returncode == 0, done.stderr
    exported = stored.work / "weights" / "model.safetensors"
    assert exported.read_bytes() == (stored.run("zero3") / "weights" / "model.safetensors").read_bytes()
