"""Real MLflow for the tracking tests: one initialised sqlite store, and one server that can be frozen and killed."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.config.schema import MlflowConfig
from ortlaunch.run.journal import Journal
from tests.support.servers import Server

PATIENCE = "MLFLOW_HTTP_REQUEST_TIMEOUT", "60"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Relays send soon, so that tests need not wait; how long they wait for answers is gone in the next test."""
    monkeypatch.setattr("ortlaunch.tracking.relay._GATHER_SECONDS", 0.2)
    monkeypatch.setenv(*PATIENCE)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that is not up yet: tests call `up()`."""
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.kill()


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> MlflowConfig:
    """An embedded store; the first test to send something initialises it."""
    folder = tmp_path_factory.mktemp("läufe und mehr")
    return MlflowConfig(uri=f"sqlite:///{folder}/mlruns.db", artifacts=str(folder / "mlartifacts"), timeout_seconds=2)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Opens an MLflow client of its own on a URI, which waits longer for answers than the relay before it."""

    def connect(uri: str) -> Any:
        from mlflow import MlflowClient

        monkeypatch.setenv(*PATIENCE)
        return MlflowClient(tracking_uri=uri, registry_uri=uri)

    return connect


@pytest.fixture
def new_run(tmp_path: Path) -> Callable[..., tuple[Path, Journal]]:
    """Makes a run folder with a journal that has its start."""

    def make(experiment: str, name: str = "run", run_id: str = "") -> tuple[Path, Journal]:
        run_id = run_id or uuid.uuid4().hex[:6]
        run_dir = tmp_path / "runs" / experiment / f"20260101-{name}-{run_id}"
        run_dir.mkdir(parents=True)
        journal = Journal(run_dir / "journal.jsonl")
        journal.start(experiment, name, run_id)
        return run_dir, journal

    return make


@pytest.fixture
def history() -> Callable[..., list[tuple[int, float]]]:
    """All points of a metric as (step, value), in the order of steps."""

    def read(client: Any, run_id: str, key: str) -> list[tuple[int, float]]:
        return sorted((point.step, point.value) for point in client.get_metric_history(run_id, key))

    return read
