"""A run whose workers still load is stopped by the service: it was asked for, so it reads stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.service import Server, start
from tests.support.stuck import loading_model

pytestmark = pytest.mark.nightly
PATIENCE = 120


def wait_for(what: Callable[[], Any]) -> Any:
    """Waits until there is something, and returns it."""
    deadline = time.monotonic() + PATIENCE
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return found


def row_in(server: Server, run: str, state: str) -> dict[str, Any] | None:
    """The row of a run, once it has a state."""
    row: dict[str, Any] = server.ask("GET", f"/api/runs/{run}").json["row"]
    return row if row["state"] == state else None


def test_a_run_that_loads_is_stopped_and_can_go_on(tmp_path: Path) -> None:
    words = dict(word.split("=") for word in loading_model(tmp_path))
    server = start(tmp_path, "--slots=1")
    try:
        server.first_administrator()
        keys = {**words, "trainer": "single", "train.steps": 5, "train.log_every": 1}
        made = server.ask("POST", "/api/runs", {"keys": keys})
        assert made.status == 201, made.body
        run = made.json["id"]
        wait_for((tmp_path / "loading").exists)
        assert server.ask("POST", f"/api/runs/{run}/cancel").status == 202
        row = wait_for(lambda: row_in(server, run, "stopped"))
        assert row["reason"] == "before its first step"
        (tmp_path / "go").touch()
        again = server.ask("POST", f"/api/runs/{run}/resume", {})
        assert again.status == 201, again.body
        assert wait_for(lambda: row_in(server, run, "finished"))["step"] == 5
    finally:
        server.end()
