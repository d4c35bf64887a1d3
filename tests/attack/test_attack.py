"""A part of ``make test-attack``: bad requests over all verbs and keys, each with one clear message and code 2."""

from __future__ import annotations

import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest

from ortlaunch import cli
from ortlaunch.cli import VERBS
from ortlaunch.config.keys import known_keys
from ortlaunch.config.schema import GROUPS
from tests.attack.attack import attack
from tests.attack.forked import STARTED, Answer, forked, separate
from tests.attack.judge import faults_of
from tests.attack.keys import all_keys
from tests.attack.requests import Request, drawn
from tests.attack.world import RUN, made
from tests.support.environment import environment

SEED = 16
COUNT = 40
IN_PROCESSES = 6


def test_bad_requests_are_refused_in_one_message_and_leave_nothing(tmp_path: Path) -> None:
    # A process of its own: it forks, and this one has threads and other tests' state.
    variables = {"ORTLAUNCH_ATTACK_SEED": str(SEED), "ORTLAUNCH_ATTACK_COUNT": str(COUNT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.attack"]
    done = subprocess.run(command, env=environment() | variables, capture_output=True, text=True, timeout=240)
    assert f"tried {COUNT:>4}  passed {COUNT:>4}\n" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0


def test_some_of_them_as_a_user_makes_them(tmp_path: Path) -> None:
    chosen = list(islice(drawn(SEED + 1), 5 * IN_PROCESSES))[::5]
    result = attack(chosen, tmp_path, separate)
    assert result.tried.total() == IN_PROCESSES
    assert not result.failures, result.report


def test_every_verb_and_every_key_is_attacked() -> None:
    requests = list(islice(drawn(0), 1500))
    words = [word for request in requests for word in request.words]
    assert {verb for verb in VERBS if verb != "run"} <= set(words)
    keys = {key.name for key in all_keys()}
    nodes = {*GROUPS, "model", "train", "eval", "backend.debug", "launcher.container"}
    others = {key for key in known_keys() if key not in nodes and not key.endswith(".name")}
    assert keys >= {key for key in others if key.partition(".")[0] != "script"}, "those of scripts need a script"
    attacked = {word.lstrip("+").partition("=")[0] for word in words if "=" in word}
    assert keys <= attacked


def test_a_seed_draws_the_same_requests_again() -> None:
    first, again, other = (list(islice(drawn(seed), 50)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_good_request_is_told_from_a_bad_one(tmp_path: Path) -> None:
    good = [
        Request("good", ["model=mlp", "train.steps=2"]),
        Request("good", ["status", RUN]),
        Request("good", ["compare", "--help"]),
    ]
    result = attack(good, tmp_path)
    faults = [found for _, found, _ in result.failures]
    assert "the request was taken" in faults[0] and any(fault.startswith("left behind: ") for fault in faults[0])
    assert "exit code 0" in faults[1]
    assert "exit code 0" in faults[2]


def test_what_is_no_good_answer() -> None:
    def faults(err: str, code: int = 2, changed: tuple[str, ...] = ()) -> list[str]:
        return faults_of(Answer(code, "", err, 0.1), list(changed))

    assert faults("ortlaunch: train.steps=0: must be at least 1\n") == []
    assert faults("ortlaunch: x\n", code=1) == ["exit code 1"]
    assert faults("ortlaunch: x\n", code=STARTED) == ["the request was taken"]
    assert faults("ortlaunch: x\n" * 7) == ["7 lines"]
    assert faults("") == ["0 lines", "no message of ours"]
    assert faults("Traceback (most recent call last):\n") == ["a traceback", "no message of ours"]
    assert faults("ortlaunch: \x1b[31m\n") == ["control characters"]
    assert faults("ortlaunch: x\n", changed=("work/runs",)) == ["left behind: work/runs"]


def test_a_request_that_gives_no_answer_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "dispatch", lambda _words: time.sleep(60))
    answer = forked(["models"], made(tmp_path / "world"), seconds=3.0)
    assert answer.is_late
    assert "no answer in time" in faults_of(answer, [])
