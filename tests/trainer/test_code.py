"""The user's own code as a run records it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from ortlaunch.run.run import Run
from ortlaunch.trainer.run import _code_tags


def test_other_code_of_an_imported_module_is_another_tag_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    run, file = Run(tmp_path), tmp_path / "mine_of_a_run.py"
    file.write_text("W = 1\n")
    monkeypatch.setitem(sys.modules, "mine_of_a_run", importlib.import_module("mine_of_a_run"))
    first, again = _code_tags(run), _code_tags(run)
    assert first == again
    assert capsys.readouterr().out == ""
    file.write_text("W = 2\n")
    other = _code_tags(run)
    assert other["ortlaunch.code"] != first["ortlaunch.code"]
    assert other["ortlaunch.changed_modules"] == "mine_of_a_run"
    assert "goes on with other code than before: mine_of_a_run" in capsys.readouterr().out
