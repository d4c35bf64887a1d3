"""`ortlaunch doctor` on this environment, and on broken ones."""

from __future__ import annotations

import base64
import http.server
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.base.locks import exclusive
from ortlaunch.config.tracking_uri import sqlite_uri
from ortlaunch.doctor import machine, service, stack, tracking
from ortlaunch.doctor.line import Level
from ortlaunch.ort import extension
from ortlaunch.tracking import sqlite_store
from tests.support.nightly import first_in_ci
from tests.support.ort import MISSING


def doctor(*arguments: str, site: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([*([str(site)] if site else []), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, "-m", "ortlaunch", "doctor", *arguments],
        env={**os.environ, "PYTHONPATH": paths, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def lines(*, site: Path | None = None, **variables: str) -> dict[str, dict[str, Any]]:
    result = doctor("--json", site=site, **variables)
    report = json.loads(result.stdout)
    assert report["healthy"] == (result.returncode == 0)
    assert report["healthy"] == all(line["level"] != "error" for line in report["lines"])
    return {line["name"]: line for line in report["lines"]}


def pretend(site: Path, package: str) -> None:
    """An installed package, as far as its metadata goes."""
    folder = site / f"{package.replace('-', '_')}-1.19.2.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.19.2\n")


def test_this_environment_is_healthy() -> None:
    of_ort = (
        ("onnxruntime-training", "aten_op_executor is built", "ortmodule") if MISSING is None else ("eager by default",)
    )
    for name in extension.needed() if MISSING is None else ():
        extension.build(name)
    result = doctor()
    assert result.returncode == 0, result.stdout
    # The report alone; what libraries say while they are imported is not in it.
    assert {line.split()[0] for line in result.stdout.splitlines()} <= {"ok", "warning", "fix:", "by"}
    for name in ("python", "torch", "driver", *of_ort):
        assert name in result.stdout


@pytest.mark.ort
@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([], ["ORTModule supports torch", "nothing to adapt"]),
        (["a is moved", "b is off"], ["every run adapts torch", "nothing is to do (a is moved; b is off)"]),
    ],
)
def test_what_ortmodule_needs_on_this_torch_is_said_in_words(monkeypatch, steps: list[str], words: list[str]) -> None:
    monkeypatch.setattr("ortlaunch.ort.compat.before_import", lambda: steps)
    line = next(stack.ortmodule())
    assert (line.name, line.level, line.fix) == ("compatibility", Level.ok, None)
    for word in (*words, torch.__version__):
        assert word in line.text


@pytest.mark.ort
@pytest.mark.parametrize("other", first_in_ci(["onnxruntime", "onnxruntime-gpu", "onnxruntime-training"], 1))
def test_two_onnxruntimes_at_once_are_an_error_with_the_way_out(tmp_path: Path, other: str) -> None:
    pretend(tmp_path, other)
    line = lines(site=tmp_path)["onnxruntime"]
    assert line["level"] == "error"
    assert other in line["text"]
    assert line["fix"].startswith("pip uninstall -y onnxruntime")
    assert "&& pip install 'ortlaunch[ort]'" in line["fix"]


@pytest.mark.ort
def test_an_extension_that_is_not_built_is_a_warning_with_its_command(tmp_path: Path) -> None:
    line = lines(ORTLAUNCH_CACHE=str(tmp_path))["extension"]
    assert line["level"] == "warning"
    assert "aten_op_executor" in line["text"]
    assert line["fix"] == f"{sys.executable} -m ortlaunch.ort.extension"
    # It looks; it does not build.
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.ort
def test_each_cuda_library_is_shown_and_a_missing_one_mended(copied_site) -> None:
    pretend(copied_site.path, "onnxruntime-training")
    shutil.rmtree(copied_site.path / "nvidia" / "cufft")
    with_driver = lines(site=copied_site.path, LD_LIBRARY_PATH=str(copied_site.driver_folder))
    assert with_driver["driver"]["text"].endswith("CUDA up to 12.4")
    assert with_driver["libcudnn.so.8"]["level"] == "ok"
    assert str(copied_site.path) in with_driver["libcudnn.so.8"]["text"]
    missing = with_driver["libcufft.so.10"]
    assert missing["level"] == "error"
    assert missing["fix"] == "pip install --force-reinstall --no-deps nvidia-cufft-cu11==10.9.0.58"
    # Where there is no driver nothing can use it yet.
    assert lines(site=copied_site.path)["libcufft.so.10"]["level"] == "warning"


@pytest.mark.ort
def test_the_cpu_package_on_a_machine_with_a_driver_is_a_warning(cuda_site) -> None:
    driver = str(cuda_site.driver_folder)
    line = lines(LD_LIBRARY_PATH=driver)["onnxruntime"]
    assert line["level"] == "warning"
    assert "ortlaunch[cuda]" in line["fix"]


def test_the_machine_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = {line.name: line for line in (*machine.disk(), *machine.shared_memory())}
    assert f"{tmp_path}/runs" in found["disk of runs"].text
    # It looks; it leaves nothing.
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("free", "level"), [(0.5, Level.error), (5, Level.warning), (50, Level.ok)])
def test_a_full_disk_is_told_before_a_checkpoint_finds_out(monkeypatch, free: float, level: Level) -> None:
    usage = shutil._ntuple_diskusage(100 * 2**30, 0, int(free * 2**30))
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)
    assert {line.level for line in machine.disk()} == {level}


def test_little_shared_memory_is_a_warning(monkeypatch) -> None:
    """What Docker gives without being asked."""
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**26, 0, 2**26))
    (line,) = machine.shared_memory()
    assert line.level is Level.warning and "--shm-size" in line.text


@pytest.mark.parametrize(
    ("sbatch", "scontrol", "level", "words"),
    [
        ("echo slurm 23.11.4", "echo Slurmctld at c1 is UP", "ok", "slurm 23.11.4, its controller answers"),
        ("echo slurm 23.11.4", "echo Slurmctld at c1 is DOWN", "warning", "does not answer"),
        ("echo error: no config >&2; exit 1", "exit 1", "warning", "belongs to no cluster"),
    ],
)
def test_slurm_is_asked(tmp_path: Path, monkeypatch, sbatch: str, scontrol: str, level: str, words: str) -> None:
    for name, body in (("sbatch", sbatch), ("scontrol", scontrol)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (line,) = machine.slurm()
    assert line.level.value == level and words in line.text


class Server(http.server.BaseHTTPRequestHandler):
    """Answers as an MLflow server does."""

    version = "3.17.2"
    password: str | None = None
    ahead = 0.0

    def do_GET(self) -> None:
        asked = base64.b64encode(f"admin:{self.password}".encode()).decode()
        refused = self.password is not None and self.path.startswith("/api")
        code = 401 if refused and self.headers.get("Authorization") != f"Basic {asked}" else 200
        self.send_response(code)
        self.end_headers()
        self.wfile.write(self.version.encode() if self.path == "/version" else b"{}")

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(time.time() + self.ahead)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def serve():
    """Starts a server with some of its answers changed; returns its URI."""
    servers = []

    def start(**changed: object) -> str:
        servers.append(http.server.HTTPServer(("127.0.0.1", 0), type("Changed", (Server,), changed)))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()


def test_a_tracking_server_that_fits(serve, monkeypatch) -> None:
    monkeypatch.setattr(tracking.importlib.metadata, "version", lambda _: "3.17.2")
    (store,) = tracking.mlflow(serve())
    assert store.level is Level.ok and "version 3.17.2" in store.text
    # A password is asked for, and then given.
    uri = serve(password="correct horse")
    (store,) = tracking.mlflow(uri)
    assert store.level is Level.error and "401" in store.text and "MLFLOW_TRACKING_PASSWORD" in store.fix
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "correct horse")
    assert next(tracking.mlflow(uri)).level is Level.ok


def test_a_tracking_server_that_does_not_fit(serve, monkeypatch) -> None:
    monkeypatch.setattr(tracking.importlib.metadata, "version", lambda _: "3.17.2")
    (store,) = tracking.mlflow(serve(version="3.10.1"))
    assert store.level is Level.warning and "3.10.1" in store.text
    (gone,) = tracking.mlflow("http://me:secret@127.0.0.1:9")
    assert gone.level is Level.warning and "secret" not in gone.text and "ortlaunch sync" in gone.fix


def test_a_store_in_a_file(tmp_path: Path, monkeypatch) -> None:
    uri = f"sqlite:///{tmp_path}/mlruns.db"
    (line,) = tracking.mlflow(uri)
    assert line.level is Level.ok and not list(tmp_path.iterdir())
    (tmp_path / "mlruns.db").write_text("no database")
    (line,) = tracking.mlflow(uri)
    assert line.level is Level.error
    # Where runs go that name no store.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert next(tracking.mlflow(None)).text == line.text


def test_a_store_that_runs_would_refuse_is_an_error(monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "./mlruns")
    with pytest.raises(RequestError, match=r"^MLFLOW_TRACKING_URI=\./mlruns is a file store"):
        next(tracking.mlflow(None))


def test_a_store_that_another_process_has_locked_is_not_called_broken(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sqlite_store, "_BUSY_SECONDS", 0.1)
    path = tmp_path / "50%25 done" / "mlruns.db"
    path.parent.mkdir()
    ((newest,), uri) = sqlite_store.migrations()[1], sqlite_uri(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("create table runs (run_uuid text)")
        writer.execute("create table alembic_version (version_num text)")
        writer.execute("insert into alembic_version values (?)", (newest,))
        (line,) = tracking.mlflow(f"{uri}?timeout=3")
        assert line.level is Level.ok and f"0 runs in {path}" in line.text
        writer.execute("insert into runs values ('one')")
        (line,) = tracking.mlflow(uri)
        assert f"1 run in {path}" in line.text
        writer.execute("begin exclusive")
        (line,) = tracking.mlflow(uri)
    assert line.level is Level.warning and "locked" in line.text and line.fix is None


def test_a_services_database_in_another_place_is_looked_at(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("sqlalchemy")
    from ortlaunch.serve.database import open_database

    monkeypatch.chdir(tmp_path)
    (line,) = service.service()
    assert (line.level, "(--database FILE looks at another)" in line.text) == (Level.ok, True)
    # Signs that mean something in SQLite's addresses.
    file = tmp_path / "a?b#c%41" / "serve.db"
    (line,) = service.service(file)
    assert (line.level, line.fix) == (Level.error, None)
    assert "there is no such file" in line.text
    file.parent.mkdir()
    open_database(file).dispose()
    (line,) = service.service(file)
    assert (line.level, f"no service runs on {file}" in line.text) == (Level.ok, True)
    # A look takes no lock, which a service that starts at that moment would find taken.
    lock = file.with_suffix(".lock")
    assert not lock.exists()
    with exclusive(lock):
        (line,) = service.service(file)
    assert (line.level, f"; a service runs on {file}" in line.text) == (Level.ok, True)
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA user_version = 99")
    (line,) = service.service(file)
    assert (line.level, "has tables of version 99" in line.text) == (Level.error, True)
