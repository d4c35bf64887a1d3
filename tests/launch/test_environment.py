"""The record of what surrounded a run holds what matters and no secrets."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from ortlaunch.launch import environment


def test_secrets_in_the_environment_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hunter2")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    record = environment.describe(["model=gpt2"])
    assert "hunter2" not in json.dumps(record)
    assert record["variables"]["NCCL_DEBUG"] == "INFO"
    assert record["command"] == ["ortlaunch", "model=gpt2"]
    assert record["packages"]["deepspeed"]


def test_the_commit_and_its_changes_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert environment.git_state() is None
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "x").write_text("1")
    subprocess.run([*git, "add", "x"], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)
    state = environment.git_state()
    assert state is not None
    assert len(state["commit"]) == 40
    assert state["dirty"] is False
    (tmp_path / "x").write_text("2")
    assert environment.git_state()["dirty"] is True
