"""A service in this process, over run folders as runs leave them."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from ortlaunch.run.identity import start_ticks
from ortlaunch.serve.access import Role
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
