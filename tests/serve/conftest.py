"""Run folders for the service's tests, and no answer of a scheduler from another test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ortlaunch.serve.queue import slots
from tests.launch.follow.conftest import Maker


@pytest.fixture(autouse=True)
def cache_of_this_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees what a scheduler answered in another."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def gpus_of_this_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs that programs stand in for have the same names in other tests, which may run at the same time."""
    monkeypatch.setattr(slots, "_SIGN", f"test {os.getpid()} {tmp_path.name}")


@pytest.fixture
def make_run(tmp_path: Path) -> Maker:
    return Maker(tmp_path / "runs")
