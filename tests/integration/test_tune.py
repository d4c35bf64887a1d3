"""A real tuning: it is killed, goes on, and its result can be used."""

from __future__ import annotations

import json
import shlex
import signal
import time
from pathlib import Path

import pytest

WORDS = ("model=mlp", "device=cpu", "backend=eager", "trainer=ddp,single", "launcher.workers_per_node=1")
MORE = ("train.steps=1000", "--hold=train.batch_size,train.activation_checkpointing", "--minutes=1", "--format=json")
SECONDS = 120


@pytest.mark.nightly
def test_a_killed_tuning_goes_on_to_a_winner_whose_command_runs(launch, start, leftovers, tmp_path):
    first = start(tmp_path, "tune", *WORDS, *MORE)
    notes = _noted(first, tmp_path, 2)
    beside = launch(tmp_path, "tune", *WORDS, *MORE)
    assert beside.returncode == 2, beside.report
    assert "another process runs this tuning: wait for it" in beside.stderr
    first.process.send_signal(signal.SIGKILL)
    first.process.communicate()
    deadline = time.monotonic() + SECONDS
    while (left := leftovers(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []
    known = notes.read_text()

    second = launch(tmp_path, "tune", *WORDS, *MORE)
    assert second.returncode == 0, second.report
    result = json.loads(second.stdout)
    assert Path(result["folder"]) == notes.parent
    assert notes.read_text().startswith(known)
    keys = [json.loads(line)["key"] for line in notes.read_text().splitlines()]
    assert len(set(keys)) == len(keys), "a trial was made twice"
    assert result["winner"]["backend"] == "eager"
    assert result["score"] > 0
    assert {trial["cell"]["trainer"] for trial in result["trials"]} >= {"ddp"}

    again = launch(tmp_path, "tune", *WORDS, *MORE)
    assert json.loads(again.stdout) == result
    compared = launch(tmp_path, "compare", "--sweep", result["folder"])
    assert compared.returncode == 0, compared.report
    assert "mlp-eager-ddp-w1-b4" in compared.stdout
    run = launch(tmp_path, *shlex.split(result["command"])[1:], "train.steps=5", "tracking=none")
    assert run.returncode == 0, run.report
    assert max(run.losses) == 5


def _noted(command, folder: Path, count: int) -> Path:
    """The notes of a tuning, once they have so many lines."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and command.process.poll() is None:
        for notes in folder.glob("runs/*/*/notes.jsonl"):
            if len(notes.read_text().splitlines()) >= count:
                return notes
        time.sleep(0.2)
    raise AssertionError(command.process.communicate())
