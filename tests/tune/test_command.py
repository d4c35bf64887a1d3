"""What the verb does around its search, and what is left where it finds nothing."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

import psutil
import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.run.events import Ended, Started
from ortlaunch.run.journal import iterate
from ortlaunch.tune import command, search
from ortlaunch.tune.search import Finding
from ortlaunch.tune.space import Space
from tests.support.cli import answer

WORDS = ("model=mlp", "device=cpu", "backend=eager", "trainer=single", "tracking=none")
OPTIONS = argparse.Namespace(memory=2**30, again=False, minutes=10.0)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """How the searches end, one by one."""
    left: list[Any] = []

    class Ending:
        def __init__(self, *words: Any) -> None:
            pass

        def run(self) -> Finding:
            end = left.pop(0)
            if isinstance(end, Finding):
                return end
            raise end

    monkeypatch.setattr(command, "Search", Ending)
    return left


def space_of(folder: Path) -> Space:
    return Space([*WORDS, f"run_root={folder}"])


def test_an_option_that_is_given_twice_counts_twice() -> None:
    options = command._parser().parse_args(["--hold=backend,trainer", "--hold", "train.batch_size", "--free", "seed"])
    assert (options.hold, options.free) == (["backend", "trainer", "train.batch_size"], ["seed"])


def test_after_an_interruption_the_command_that_goes_on_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    for how in ("", " without --again"):
        with pytest.raises(KeyboardInterrupt), command._ended_in_order(how):
            raise KeyboardInterrupt
        assert f"interrupted; the same command{how} goes on where it was\n" in capsys.readouterr().err


def test_the_sweep_has_ended_as_the_search_has_and_begins_again_with_it(
    tmp_path: Path, ends: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends += [KeyboardInterrupt(), RequestError("a rule"), Finding(None)]
    monkeypatch.setattr(command, "end_sweep_as", _told(command.end_sweep_as))
    for expected in (pytest.raises(KeyboardInterrupt), pytest.raises(RequestError), contextlib.nullcontext()):
        with expected:
            command.tuned(space_of(tmp_path), OPTIONS, [], quiet=True)
    (journal,) = tmp_path.glob("default/multirun-*/journal.jsonl")
    told = [event for event in iterate(journal) if isinstance(event, Started | Ended)]
    assert [getattr(event, "status", "start") for event in told] == ["start", "KILLED", *["start", "FAILED"] * 2]
    assert len({event.run_id for event in told if isinstance(event, Started)}) == 1
    # What a tracker says is no part of what a program reads.
    assert capsys.readouterr().out == ""


def _told(end: Any) -> Any:
    def told(*words: Any) -> Any:
        print("MLflow is not there")
        return end(*words)

    return told


def test_a_result_is_shown_again_unless_nothing_trained_the_machine_failed_or_there_are_more_minutes(
    tmp_path: Path, ends: list[Any]
) -> None:
    space = space_of(tmp_path)
    won, lost = Finding(space.cell), Finding(None)
    failed = Finding(space.cell, measured={space.cell: [search.Outcome("failed", 1.0, is_of_machine=True)]})
    more = argparse.Namespace(memory=2**30, again=False, minutes=20.0)
    anew = argparse.Namespace(memory=2**30, again=True, minutes=10.0)
    made = []
    for options in (OPTIONS, OPTIONS, OPTIONS, OPTIONS, more, anew):
        ends[:] = [(lost, failed, won)[min(len(made), 2)]]
        command.tuned(space, options, [], quiet=True)
        made += [options] if not ends else []
    assert made == [OPTIONS, OPTIONS, OPTIONS, more, anew]


HANGING = """\
import time
import torch

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(64, 10)

    def forward(self, x):
        time.sleep(600)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        (("--memory=210MiB",), "out of memory: more than the 0.21 GiB it may have"),
        (("model.target=nets:Net",), "time-out: not done after"),
    ],
    ids=["no cell fits", "a trial hangs"],
)
def test_a_search_in_which_nothing_trains_is_one_message_and_leaves_nothing_running(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    verdict: str,
) -> None:
    (tmp_path / "nets.py").write_text(HANGING)
    monkeypatch.setattr(search, "_LEAST_TIMEOUT", 10.0)
    model = ("model=factory", *WORDS[1:]) if "nets" in words[0] else WORDS
    result = answer(tmp_path, capfd, "tune", *model, *words, "train.activation_checkpointing=false", "--minutes=0.3")
    assert result.returncode == 1, result.stderr
    assert verdict in result.stdout
    assert f"no configuration trained; what each trial printed is in {tmp_path}" in result.stdout.splitlines()[-1]
    assert "Traceback" not in result.stdout + result.stderr
    left = [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(one.info["cmdline"] or [])]
    assert left == []
