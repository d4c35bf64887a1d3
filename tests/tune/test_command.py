"""What the verb asks beside its trials."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.compose.prepare import prepared
from ortlaunch.config.load import to_config
from ortlaunch.config.schema import Precision
from ortlaunch.run.events import Ended, Started
from ortlaunch.run.journal import iterate
from ortlaunch.tune import command
from ortlaunch.tune.cell import Cell
from ortlaunch.tune.folder import TuneFolder
from ortlaunch.tune.notes import Notes
from ortlaunch.tune.plan import Finding
from ortlaunch.tune.space import Space
from ortlaunch.tune.words import taken_apart


def tuning_of(space: Space, path: Path) -> command._Tuning:
    folder = cast(TuneFolder, SimpleNamespace(path=path, close=lambda: None))
    return command._Tuning(space, argparse.Namespace(memory=2**30), folder, quiet=True)


def test_a_freed_precision_is_checked_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []

    def look(config: Any, *, with_cost: bool, quiet: bool, timeout: float) -> dict[str, Any]:
        checked.append(config.train.precision.name)
        return {"fit": checked[-1] == "fp32", "verdict": f"verdict for {checked[-1]}"}

    def configured(cell: Cell) -> Any:
        return SimpleNamespace(train=SimpleNamespace(precision=Precision[str(cell["precision"])]))

    monkeypatch.setattr(command, "look", look)
    # On the CPU a rule refuses bf16 under ONNX Runtime, so that no real space here has both.
    tuning = tuning_of(cast(Space, SimpleNamespace(configured=configured)), tmp_path)
    low, full = (Cell.of(backend="ort", micro_batch=4, precision=name) for name in ("bf16", "fp32"))
    assert tuning._unfit(low) == "ortlaunch check: verdict for bf16"
    assert tuning._unfit(full) is None
    # Cells of one precision share an answer.
    assert tuning._unfit(full.having(micro_batch=1)) is None
    assert checked == ["bf16", "fp32"]


def test_a_check_that_ended_early_is_made_again_when_the_search_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Any] = [RequestError("the check itself ended early"), {"fit": True, "verdict": "fit"}]

    def look(*words: Any, **options: Any) -> dict[str, Any]:
        answer = answers.pop(0)
        if isinstance(answer, RequestError):
            raise answer
        return dict(answer)

    monkeypatch.setattr(command, "look", look)
    config = SimpleNamespace(train=SimpleNamespace(precision=Precision.fp32))
    space = cast(Space, SimpleNamespace(configured=lambda cell: config))
    one, other = (Cell.of(backend="ort", micro_batch=size) for size in (1, 2))
    tuning = tuning_of(space, tmp_path)
    assert [tuning._unfit(cell) for cell in (one, other)] == ["ortlaunch check: the check itself ended early"] * 2
    assert tuning_of(space, tmp_path)._unfit(one) is None
    assert answers == []


def test_a_limit_or_a_check_that_another_version_has_noted_otherwise_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = Notes(tmp_path / "notes.jsonl")
    notes.put("limit", {"gib": 3})
    notes.put("check fp32", {"is_fit": True})
    folder = cast(TuneFolder, SimpleNamespace(path=tmp_path))
    config = SimpleNamespace(train=SimpleNamespace(precision=Precision.fp32))
    space = cast(Space, SimpleNamespace(configured=lambda cell: config))
    monkeypatch.setattr(command, "look", lambda *words, **options: {"fit": True, "verdict": "fit"})
    tuning = command._Tuning(space, argparse.Namespace(memory=None), folder, quiet=True)
    assert tuning._limit > 2**20
    assert tuning._unfit(Cell.of(backend="ort")) is None


def test_after_an_interruption_the_command_that_goes_on_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    for how in ("", " without --again"):
        with pytest.raises(KeyboardInterrupt), command._ended_in_order(how):
            raise KeyboardInterrupt
        assert f"interrupted; the same command{how} goes on where it was\n" in capsys.readouterr().err


def test_what_a_tracker_says_at_the_end_does_not_stand_before_the_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "end_sweep_as", lambda folder, config, statuses: print("MLflow is not there"))
    taken = taken_apart(
        ("model=mlp", "device=cpu", "backend=eager", "trainer=single", "launcher.workers_per_node=1"), ()
    )
    tuning_of(Space(prepared(to_config(compose(taken.composed))), taken), tmp_path)._end_sweep("FINISHED")
    read = capsys.readouterr()
    assert (read.out, read.err) == ("", "MLflow is not there\n")


@pytest.mark.parametrize("failed", [0, 1])
def test_a_result_with_failures_of_the_machine_is_not_the_last_word(
    failed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = {"minutes": 10.0, "date": "today", "of_machine": failed, "winner": {"backend": "eager"}}
    folder = SimpleNamespace(path=tmp_path, result=lambda: done, open=lambda: None)
    monkeypatch.setattr(command.folders, "machine", dict)
    monkeypatch.setattr(command.folders, "key_of", lambda *words: "key")
    monkeypatch.setattr(command.folders, "find", lambda *words: folder)
    monkeypatch.setattr(command._Tuning, "__init__", lambda *words, quiet: None)
    monkeypatch.setattr(command._Tuning, "run", lambda tuning: {"searched": True})
    options = argparse.Namespace(memory=None, again=False, minutes=10.0)
    found = command.tuned(cast(Space, SimpleNamespace(asked=None)), options, [], quiet=True)
    assert found == ({"searched": True} if failed else done)


def small_space(folder: Path) -> Space:
    words = ("model=mlp", "device=cpu", "backend=eager", "trainer=single", f"run_root={folder}", "tracking=none")
    taken = taken_apart(words, ())
    return Space(prepared(to_config(compose(taken.composed))), taken)


def test_the_sweep_has_ended_as_the_search_has_and_begins_again_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[Any] = [KeyboardInterrupt(), RequestError("a rule"), Finding(None)]

    class Search:
        def __init__(self, *words: Any) -> None:
            pass

        def run(self) -> Finding:
            if isinstance(ends[0], Finding):
                return ends[0]
            raise ends.pop(0)

    monkeypatch.setattr(command, "Schedule", Search)
    options = argparse.Namespace(memory=2**30, again=False, minutes=10.0)
    for expected in (pytest.raises(KeyboardInterrupt), pytest.raises(RequestError), contextlib.nullcontext()):
        with expected:
            command.tuned(small_space(tmp_path), options, [], quiet=True)
    (journal,) = tmp_path.glob("default/multirun-*/journal.jsonl")
    told = [event for event in iterate(journal) if isinstance(event, Started | Ended)]
    assert [getattr(event, "status", "start") for event in told] == ["start", "KILLED", *["start", "FAILED"] * 2]
    assert len({event.run_id for event in told if isinstance(event, Started)}) == 1


def test_a_search_in_which_nothing_trained_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = small_space(tmp_path)
    whole = {"trials": [], "not_tried": [], "trials_run": 1, "seconds": 1.0, "steps": 1, "busy": {"trials": 0}}
    searched: list[Path] = []

    def run(tuning: Any) -> dict[str, Any]:
        searched.append(tuning._folder.path)
        result = {**whole, "winner": None, "folder": "here", "minutes": 10.0, "date": "today"}
        tuning._folder.write_result(result)
        return result

    monkeypatch.setattr(command._Tuning, "run", run)
    options = argparse.Namespace(memory=None, again=False, minutes=10.0)
    for _ in range(2):
        assert command.tuned(space, options, [], quiet=True)["winner"] is None
    assert len(set(searched)) == 2
