"""Whole runs whose tracking server goes away, and that are killed: MLflow has every point in the end, once."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.conftest import Started, journal, mentioning
from tests.support.servers import Server, points
from tests.support.waiting import until

WORDS = ("model=mlp", "backend=eager", "train.log_every=1", "train.save_weights=false", "tracking.timeout_seconds=60")
PASSWORD = "sehr%20geheim"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that is not up yet."""
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.kill()


def in_mlflow(server: Server, run_dir: Path) -> tuple[Any, Counter[tuple[str, int, float]]]:
    """The one run of a run folder, and how often each of its points is there."""
    from mlflow import MlflowClient

    client = MlflowClient(server.uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (run,) = client.search_runs(experiments, f"tags.`ortlaunch.run_dir` = '{run_dir}'")
    return run, points(client, run)


def journalled(run_dir: Path) -> Counter[tuple[str, int, float]]:
    """Every point of the journal, as often as it should be in MLflow."""
    events = [event for event in journal(run_dir) if event["event"] == "metrics"]
    return Counter({(key, e["step"], value): 1 for e in events for key, value in e["values"].items()})


def reach(run_dir: Path, step: int) -> None:
    until(lambda: any(event.get("step", 0) >= step for event in journal(run_dir)))


def test_killed_server_and_killed_run_lose_nothing(
    start: Callable[..., Started], server: Server, tmp_path: Path
) -> None:
    """The server is killed under a run, then the run and its launcher, each in the midst of what it does."""
    server.up()
    running = start(tmp_path, *WORDS, f"tracking.uri={server.uri}", "train.steps=100000")
    run_dir = running.wait_for_training()
    reach(run_dir, 100)
    server.kill()
    step = max(event.get("step", 0) for event in journal(run_dir))
    # Training goes on as if nothing had been.
    reach(run_dir, step + 200)
    for process in [psutil.Process(running.process.pid), *mentioning(run_dir)]:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
    running.process.wait()
    last = journal(run_dir)[-1]["t"]
    server.up()
    synced = start(tmp_path, "sync", str(run_dir)).finish()
    assert synced.returncode == 0, synced.report
    assert "was killed" in synced.stdout
    run, arrived = in_mlflow(server, run_dir)
    assert arrived == journalled(run_dir)
    assert len({step for key, step, _ in arrived if key == "train/loss"}) >= 300
    assert (run.info.status, run.info.end_time) == ("KILLED", last), "it lived as long as it journalled"


@pytest.mark.nightly
def test_server_that_is_never_there(start: Callable[..., Started], server: Server, tmp_path: Path) -> None:
    """The run ends well and says how to send its record, which needs one command when there is a server."""
    server.kill()
    uri = server.uri.replace("http://", f"http://anna:{PASSWORD}@")
    words = (*WORDS, f"tracking.uri={uri}", "train.steps=30", "tracking.flush_seconds=1")
    ran = start(tmp_path, *words).finish()
    assert ran.returncode == 0, ran.report
    assert f"ortlaunch sync {ran.run_dir}" in ran.stdout
    server.up()
    synced = start(tmp_path, "sync", "--all", "--uri", uri).finish()
    assert synced.returncode == 0, synced.report
    run, arrived = in_mlflow(server, ran.run_dir)
    assert arrived == journalled(ran.run_dir)
    assert run.info.status == "FINISHED"
    files = [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    told = [ran.stdout, ran.stderr, synced.stdout, synced.stderr, str(run.data.params), str(run.data.tags)]
    assert not [text for text in (*files, *told) if "geheim" in text]
