"""Runs that an earlier version has made are seen, compared and delivered; tests/integration goes on with them."""

from __future__ import annotations

import json

import pytest
from mlflow import MlflowClient

from tests.support.cli import ortlaunch
from tests.support.runs import journal
from tests.support.servers import points
from tests.support.stored import Stored, unpack

KINDS = ("single", "ddp", "ddp-ort", "zero0", "zero1", "zero2", "zero3")
RATES = ("factory-eager-single-lr=0.001", "factory-eager-single-lr=0.01")
STATES = {
    **{("kinds", name): "finished" for name in KINDS},
    **{("sweeps", name): "finished" for name in RATES},
    **{("bench", f"{name}-seed={seed}"): "finished" for name in RATES for seed in range(2)},
    ("broken", "undelivered"): "finished",
    ("broken", "failed"): "failed",
    ("broken", "stopped"): "stopped",
    ("broken", "killed"): "killed",
    ("cluster", "job"): "finished",
    ("cluster", "queued"): "pending",
    ("cluster", "requeued"): "requeued",
    ("cluster", "task-lr=0.001"): "pending",
    ("cluster", "task-lr=0.01"): "pending",
}
"""By experiment and name."""


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """For tests that only look."""
    stored = unpack(tmp_path_factory.mktemp("stored"))
    waiting = "{0}|{0}|{1}|PENDING|{2}|1|0:00|UNLIMITED|N/A||Priority|sbatch.sh"
    jobs = (101, "N/A", 0), (103, "N/A", 1), (104, 0, 0), (104, 1, 0)
    stored.queue(*(waiting.format(*job) for job in jobs))
    return stored


def asked(stored: Stored, *arguments: str) -> str:
    """What a command prints in the folder where the runs were started."""
    done = ortlaunch(stored.work, *arguments, **stored.variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def last_step(stored: Stored, run_dir: str) -> int | None:
    assert run_dir.startswith(str(stored.work))
    steps = [event["step"] for event in journal(stored.work / run_dir) if "train/loss" in event.get("values", {})]
    return max(steps, default=None)


def test_every_run_is_in_its_state(stored):
    rows = json.loads(asked(stored, "jobs", "--all", "--json"))
    assert {(row["experiment"], row["name"]): row["state"] for row in rows} == STATES
    assert [row["step"] for row in rows] == [last_step(stored, row["run_dir"]) for row in rows]
    assert {row["step"] for row in rows if row["state"] == "finished"} == {6}


def test_a_run_is_found_by_its_name_its_id_its_folder_and_its_job(stored):
    stopped = stored.run("stopped")
    checkpoint = (stopped / "checkpoints" / "latest").resolve().name
    for word in ("stopped", stopped.name[-6:], str(stopped)):
        said = asked(stored, "status", word)
        assert f"state:      stopped: at step {int(checkpoint[-8:])}\n" in said
        assert f"checkpoint: {checkpoint}\n" in said
    assert "RuntimeError: the third batch is too much" in asked(stored, "status", "failed")
    assert "why requeued: warned by a signal to the batch shell\n" in asked(stored, "status", "103")
    assert asked(stored, "logs", "stopped", "--log", "steps").splitlines()[-1] == "end KILLED"


def test_runs_are_compared_with_each_other_and_with_repeats(stored):
    sweep, bench = (str(next(stored.work.glob(f"runs/{name}/multirun-*"))) for name in ("sweeps", "bench"))
    compared = json.loads(asked(stored, "compare", "--experiment", "kinds", "--format", "json", "--html", "runs.html"))
    assert sorted(run["run"] for run in compared["runs"]) == sorted(KINDS)
    assert {run["status"] for run in compared["runs"]} == {"FINISHED"}
    assert all(run["samples_per_second_median"] > 0 for run in compared["runs"])
    assert (stored.work / "runs.html").read_text().count('"label":') == len(KINDS)
    compared = json.loads(asked(stored, "compare", "--sweep", sweep, "--format", "json"))
    assert [run["run"] for run in compared["runs"]] == list(RATES)
    compared = json.loads(asked(stored, "compare", "--sweep", bench, "--format", "json"))
    assert [(group["group"], group["seeds"]) for group in compared["groups"]] == [(name, ["0", "1"]) for name in RATES]


def test_what_mlflow_lacks_is_delivered_and_nothing_twice(tmp_path):
    """Of one run it has nothing, of the other the first half."""
    stored = unpack(tmp_path)
    uri = f"sqlite:///{stored.work}/mlruns.db"
    undelivered, killed = stored.run("undelivered"), stored.run("killed")
    begun = json.loads((killed / "relay.json").read_text())["mlflow_run_id"]
    client = MlflowClient(uri)
    before = sum(points(client, client.get_run(begun)).values())
    asked(stored, "sync", str(undelivered), str(killed), "--uri", uri)
    assert "0 events sent" in asked(stored, "sync", str(killed))
    experiment = client.get_experiment_by_name("broken").experiment_id
    runs = {run.data.tags["ortlaunch.run_dir"]: run for run in client.search_runs([experiment])}
    assert len(runs) == 4
    for run_dir, status in ((undelivered, "FINISHED"), (killed, "KILLED")):
        run = runs[str(run_dir)]
        assert run.info.status == status
        values = [event for event in journal(run_dir) if event["event"] == "metrics"]
        written = [(key, event["step"], value) for event in values for key, value in event["values"].items()]
        assert sorted(points(client, run).elements()) == sorted(written)
    assert runs[str(killed)].info.run_id == begun
    assert 0 < before < sum(points(client, runs[str(killed)]).values())
