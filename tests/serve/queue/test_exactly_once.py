"""Runs start exactly once, though the service is killed at any moment, and they outlive it."""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.run.events import Ended, Started
from ortlaunch.run.journal import iterate
from ortlaunch.run.run import Run
from ortlaunch.serve.runner import NOT_FIRST
from tests.support.service import Server, start

_STAND_IN = """
import os, sys
words = sys.orig_argv
if "ortlaunch" in words[:5] and "serve" not in words[:6]:
    with open({ledger!r}, "a") as file:
        file.write(next((word for word in words if word.startswith("launcher.run=")), "?") + "\\n")
    os.execv(sys.executable, [sys.executable, "-P", "-m", "tests.support.stand_in", "{steps}", "none", *words[4:]])
"""
"""Every Python reads this file when it begins. What would become a run becomes one whose worker trains nothing, and is
counted."""
_KEYS = {"model": "mlp", "backend": "eager", "trainer": "single", "tracking": "none", "device": "cpu"}


@dataclass
class House:
    """A folder with a service that is killed and started again, and somebody who submits runs meanwhile."""

    folder: Path
    server: Server
    wanted: int
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def submit(self) -> None:
        """Submits runs, each again and again with its key until there is an answer."""
        for number in range(self.wanted):
            body = {"keys": {**_KEYS, "name": f"run{number}"}}
            while f"key{number}" not in self.answers:
                # The service may be killed while it answers.
                with suppress(OSError, HTTPException):
                    answer = self.server.ask("POST", "/api/runs", body, {"Idempotency-Key": f"key{number}"})
                    assert answer.status in (201, 503), answer.body
                    if answer.status == 201:
                        self.answers[f"key{number}"] = answer.json
                time.sleep(0.05)

    def restart(self, *arguments: str) -> None:
        """Kills the service and starts it again."""
        self.server.kill()
        again = start(self.folder, *arguments, PYTHONPATH=_paths(self.folder))
        # Who submits meanwhile is logged in from the first request on.
        again.cookie = self.server.cookie
        self.server = again

    def jobs(self) -> list[sqlite3.Row]:
        """All jobs, as the database has them."""
        with sqlite3.connect(f"file:{self.folder}/runs/.serve/serve.db?mode=ro", uri=True) as connection:
            connection.row_factory = sqlite3.Row
            return connection.execute("SELECT * FROM jobs ORDER BY number").fetchall()

    def wait(self, seconds: float) -> list[sqlite3.Row]:
        """Waits until all jobs are over, and returns them."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = self.jobs()
            if len(found) == self.wanted and all(job["ended"] for job in found):
                return found
            time.sleep(0.3)
        raise AssertionError([(job["id"], job["state"], job["reason"]) for job in self.jobs()])


def _paths(folder: Path) -> str:
    return ":".join([str(folder / "site"), *filter(None, sys.path)])


def house(folder: Path, wanted: int, steps: int) -> House:
    """A service with two slots, whose runs have stand-ins for workers."""
    (folder / "site").mkdir()
    code = _STAND_IN.format(ledger=str(folder / "ledger"), steps=steps)
    (folder / "site" / "sitecustomize.py").write_text(code.replace("\\\\n", "\\n"))
    server = start(folder, "--slots=2", PYTHONPATH=_paths(folder))
    server.first_administrator()
    return House(folder, server, wanted)


def most_at_once(places: list[str]) -> int:
    """How many of these runs went on at one moment, by their own journals."""
    moments = []
    for place in places:
        for event in iterate(Run(Path(place)).journal_file):
            if isinstance(event, Started | Ended):
                moments.append((event.t, 1 if isinstance(event, Started) else -1))
    now = most = 0
    for _, change in sorted(moments):
        now += change
        most = max(most, now)
    return most


@pytest.mark.parametrize(
    ("kills", "runs"), [(2, 3), pytest.param(20, 14, marks=pytest.mark.nightly)], ids=["2 kills", "20 kills"]
)
def test_nothing_is_lost_and_nothing_starts_twice_when_the_service_is_killed(
    tmp_path: Path, kills: int, runs: int
) -> None:
    rng = random.Random(kills)
    home = house(tmp_path, runs, steps=20)
    submitting = threading.Thread(target=home.submit, daemon=True)
    try:
        submitting.start()
        for _ in range(kills):
            time.sleep(rng.uniform(0.0, 2.5))
            home.restart("--slots=2")
        submitting.join(120)
        assert len(home.answers) == runs
        over = home.wait(200)
    finally:
        home.server.kill()
    ledger = Counter((tmp_path / "ledger").read_text().split())
    assert {job["run_key"] for job in over} == {answer["id"] for answer in home.answers.values()}
    assert ledger == {f"launcher.run={job['run_key']}": 1 for job in over}
    assert {job["outcome"] for job in over} == {"finished"}, [(job["id"], job["state"], job["reason"]) for job in over]
    folders = {str(path.parent) for path in (tmp_path / "runs").rglob("journal.jsonl")}
    assert folders == {job["run_dir"] for job in over}
    assert most_at_once(sorted(folders)) <= 2


def test_of_many_processes_one_becomes_the_run(tmp_path: Path) -> None:
    record, said = tmp_path / "start.json", tmp_path / "said"
    # The command that the winner becomes refuses its word and ends: what counts is who became it.
    words = [sys.executable, "-P", "-m", "ortlaunch.serve.runner", str(record), "nonsense"]
    children = [subprocess.Popen(words, stderr=said.open("ab")) for _ in range(5)]
    codes = Counter(child.wait(120) for child in children)
    assert codes == {NOT_FIRST: 4, 2: 1}
    winner = next(child for child in children if child.returncode == 2)
    assert json.loads(record.read_text())["pid"] == winner.pid
    assert said.read_text().count("nonsense: no such command") == 1
    assert [path.name for path in tmp_path.glob(".start*")] == []
