"""A service in this process, over run folders as runs leave them."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert
from starlette.testclient import TestClient

from ortlaunch.run.identity import start_ticks
from ortlaunch.run.key import RunKey
from ortlaunch.serve.access import Role
from ortlaunch.serve.database import writing
from ortlaunch.serve.queue.tables import Job
from ortlaunch.serve.service import Service
from tests.support.service import InProcess, in_process


@pytest.fixture
def served(tmp_path: Path) -> InProcess:
    return in_process(tmp_path / "runs")


@pytest.fixture
def service(served: InProcess) -> Service:
    return served.service


@pytest.fixture
def viewer(served: InProcess) -> TestClient:
    """A program that may look, and nothing else."""
    return served.client(served.token("vera", Role.viewer))


@pytest.fixture
def admin(served: InProcess) -> TestClient:
    """A program of an administrator."""
    return served.client(served.token("ada", Role.admin))


@pytest.fixture
def alive() -> dict[str, Any]:
    """A launcher.json of a process that lives: this one."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "start_ticks": start_ticks(os.getpid())}


def add_job(service: Service, number: int, run_dir: Path | str, **values: object) -> None:
    """Puts a job of the run in a folder into the database."""
    run_id = str(run_dir)[-6:]
    facts = {"user_id": 1, "owner": "olga", "unix_user": "root", "slots": 1, "submitted": time.time(), "name": "queued"}
    facts |= {
        "experiment": "waiting-room",
        "run_id": run_id,
        "run_dir": str(run_dir),
        "run_key": str(RunKey.of_folder(Path(run_dir).name)),
        "request": {},
        "words": [],
    }
    required = [one.name for one in Job.__table__.columns if not one.nullable and one.default is None]
    with writing(service.engine) as session:
        session.execute(
            insert(Job), [{**dict.fromkeys(required, ""), "id": f"q{number}", "number": number, **facts, **values}]
        )
