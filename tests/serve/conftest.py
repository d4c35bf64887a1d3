"""Run folders for the service's tests, and no answer of a scheduler from another test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.follow.conftest import Maker


@pytest.fixture(autouse=True)
def cache_of_this_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees what a scheduler answered in another."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def make_run(tmp_path: Path) -> Maker:
    return Maker(tmp_path / "runs")
