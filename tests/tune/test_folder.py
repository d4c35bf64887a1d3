"""Which folder a tuning has, what it keeps there, and that it goes on after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.launch.trial import Outcome
from ortlaunch.run.run import Run
from ortlaunch.run.sweep import SweepTask, join, note_end
from ortlaunch.tune.folder import NOTES, TuneFolder, fingerprint
from ortlaunch.tune.search import Effort
from ortlaunch.tune.space import Cell, Space
from tests.tune import pretend

WORDS = ("model=mlp", "device=cpu", "backend=eager", "trainer=ddp", "launcher.workers_per_node=1,2", "tracking=none")
A = Cell.of({"backend": "a"})
SHORT = Effort("short", 0, 2.0, None, 60.0)


def key(*words: str, free: tuple[str, ...] = (), memory: int | None = None) -> str:
    return fingerprint(Space([*WORDS, *words], free), memory)


def folder_of(path: Path, *answers: Outcome) -> tuple[TuneFolder, list[Effort]]:
    """A folder that was opened, whose trials give these outcomes one by one, and the trials that were made."""
    folder, left, made = TuneFolder(Space([*WORDS, f"run_root={path}"]), 2**30), list(answers), []

    def trial(cell: Cell, effort: Effort) -> Outcome:
        made.append(effort)
        return left.pop(0)

    folder.made = trial  # type: ignore[method-assign]
    folder.make()
    folder.open(["tune"], anew=False)
    return folder, made


def test_what_changes_the_result_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = key()
    assert plain == key("name=other")
    changed = [key("optimizer.lr=0.1"), key(memory=2**30), key("train.batch_size=4,8", free=("train.batch_size",))]
    monkeypatch.setenv("TORCHINDUCTOR_CPP_WRAPPER", "1")
    assert len({plain, *changed, key()}) == 5


def test_a_changed_model_is_another_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "nets_of_tune.py"
    words = ("model=factory", "model.target=nets_of_tune:Net", "data=digits")
    found = []
    for layers in (1, 2):
        own.write_text(f"class Net:\n    layers = {layers}\n")
        found.append(key(*words))
        assert found[-1] == key(*words)
    assert found[0] != found[1]


def test_a_search_that_goes_on_is_no_ended_sweep(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path)
    runs = [tmp_path / name for name in ("one", "two")]
    for number, run in enumerate(runs):
        run.mkdir()
        join(run, SweepTask(folder.path, number))
    folder._sweep.write([runs[0]], complete=False)
    assert note_end(runs[0], "FAILED") is None
    folder.close()

    Run(folder.path).launcher_file.unlink()
    folder_of(tmp_path)
    # A trial that ends, before it is added, does not end the sweep with the worst of the trials so far.
    assert note_end(runs[1], "FINISHED") is None
    launcher = Run(folder.path).launcher()
    assert launcher is not None
    assert launcher.pid == psutil.Process().pid


def test_a_trial_is_the_run_with_fewer_steps_and_without_what_only_long_runs_need() -> None:
    words = ("model=mlp", "device=cpu", "backend=eager", "trainer=single", "train.batch_size=12")
    space = Space([*words, "train.eval_every=10", "train.steps=5000"])
    folder = TuneFolder(space, None)
    config = folder.trained(space.cell, Effort("short", 0, 2.0, 600.0, 60.0))
    # 600 samples/s and 12 samples a step: 100 steps in 2 s, after three that do not count.
    assert config.train.steps == 103
    assert (config.train.eval_every, config.train.checkpoint_every, config.train.save_weights) == (None, None, False)
    assert config.train.memory_check.value == "off"
    # After a kill of the search, workers in a long step would go on for the usual two minutes.
    assert (config.launcher.max_restarts, config.launcher.grace_seconds) == (0, 1)
    assert config.train.batch_size == 12
    assert folder.trained(space.cell, Effort("probe", 0, 0.0, None, 60.0)).train.steps == 3 + 6
    assert folder.trained(space.cell, Effort("short", 0, 2.0, 1e9, 60.0)).train.steps == 3 + 20_000


def test_after_a_kill_the_same_search_goes_on_and_finds_the_same(tmp_path: Path) -> None:
    finding, whole = pretend.searched(tmp_path / "whole")
    command = [sys.executable, "-m", "tests.tune.pretend", str(tmp_path / "killed"), "7"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert process.stdout is not None
    for _ in range(7):
        assert process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    (notes,) = tmp_path.glob(f"killed/*/*/{NOTES}")
    before = notes.read_text().splitlines()
    assert 6 <= len(before) < len(whole.machine.trials)
    # A kill may cut a line off; the trial of that line is made again, and no other.
    notes.write_text(notes.read_text()[:-20])
    found, again = pretend.searched(tmp_path / "killed")
    assert (found.winner, found.score, found.spent) == (finding.winner, finding.score, finding.spent)
    assert list(found.measured) == list(finding.measured)
    assert len(again.machine.trials) == len(whole.machine.trials) - (len(before) - 1)
    assert again.notes == whole.notes


def test_more_minutes_go_on_with_what_was_found(tmp_path: Path) -> None:
    counts, keys = [], []
    for budget in (200.0, 200.0, 2000.0, 2000.0):
        finding, folder = pretend.searched(tmp_path, budget=budget)
        counts.append(len(folder.machine.trials))
        keys += [f"{effort.stage} {effort.number} {cell}" for cell, effort in folder.machine.trials]
        fresh = [one for each in finding.measured.values() for one in each if not one.is_noted]
        assert len(fresh) == counts[-1]
    assert counts[0] > 0
    assert counts[2] > 0
    assert (counts[1], counts[3]) == (0, 0)
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("outcome", "is_made_again"),
    [
        (Outcome("failed", 12.0, reason="Address already in use", is_of_machine=True), True),
        (Outcome("time-out", 60.1, others=0.9), True),
        (Outcome("time-out", 60.1, others=0.1), False),
        (Outcome("failed", 12.0, reason="RuntimeError: no"), False),
    ],
)
def test_what_the_machine_has_failed_is_no_result_for_later(
    tmp_path: Path, outcome: Outcome, is_made_again: bool
) -> None:
    made = []
    for _ in range(2):
        folder, efforts = folder_of(tmp_path, outcome)
        assert folder.trial(A, SHORT) == outcome
        made += efforts
    assert len(made) == 1 + is_made_again


def test_a_trial_that_did_not_end_is_made_again_when_it_may_take_twice_as_long(tmp_path: Path) -> None:
    made = []
    for timeout in (60.0, 60.0, 90.0, 150.0, 150.0):
        folder, efforts = folder_of(tmp_path, Outcome("time-out", timeout + 0.1))
        folder.trial(A, Effort("short", 0, 2.0, None, timeout))
        made += [effort.timeout for effort in efforts]
    assert made == [60.0, 150.0]


def test_the_limit_is_the_same_after_an_interruption_and_lines_that_say_nothing_are_passed_over(tmp_path: Path) -> None:
    space = Space([*WORDS, f"run_root={tmp_path}"])
    folder = TuneFolder(space, None)
    folder.make()
    lines = [json.dumps({"key": "limit", "value": {"bytes": 2**31}}), "7", json.dumps({"key": "x", "value": None}), "{"]
    (folder.path / NOTES).write_text("\n".join(lines))
    folder.open([], anew=False)
    assert folder.limit == 2**31
    assert list(folder.notes) == ["limit"]
    folder.open([], anew=True)
    assert folder.notes == {}


@pytest.mark.parametrize("kind", ["a folder", "a FIFO"])
def test_notes_that_are_no_file_are_one_message(tmp_path: Path, kind: str) -> None:
    folder = TuneFolder(Space([*WORDS, f"run_root={tmp_path}"]), None)
    folder.make()
    notes = folder.path / NOTES
    notes.mkdir() if kind == "a folder" else os.mkfifo(notes)
    with pytest.raises(RequestError, match=f"^{notes} cannot be read: it is {kind} and no plain file: move it away"):
        folder.open([], anew=False)
