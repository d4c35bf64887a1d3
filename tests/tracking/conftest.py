"""Real MLflow for the tracking tests: one initialised sqlite store, and one server that can be frozen and killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.config.schema import MlflowConfig
from ortlaunch.tracking.journal import Journal

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
START_SECONDS = 60


class Server:
    """An `mlflow server` on a loopback port that is known before it is up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def up(self) -> None:
        """Starts it unless it runs, and waits until it answers."""
        if self._process is None:
            command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--host", "127.0.0.1"]
            command += ["--port", str(self.port), "--backend-store-uri", f"sqlite:///{self.folder}/server.db"]
            command += ["--artifacts-destination", str(self.folder / "artifacts")]
            environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
            with (self.folder / "server.log").open("ab") as log:
                self._process = subprocess.Popen(
                    command, stdout=log, stderr=log, env=environment, cwd=self.folder, start_new_session=True
                )
        deadline = time.monotonic() + START_SECONDS
        while not self._healthy():
            assert time.monotonic() < deadline, (self.folder / "server.log").read_text()[-2000:]
            time.sleep(0.1)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait(10)
            self._process = None

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


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
def client() -> Callable[[str], Any]:
    """Opens an MLflow client of its own on a URI."""

    def connect(uri: str) -> Any:
        from mlflow import MlflowClient

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
