"""What a resumed run says when its code is not that of the attempt before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.launch.other_code import other_code
from ortlaunch.run.run import Run

RECORD: dict[str, Any] = {"git": {"commit": "a" * 40}, "python": "3.11.9", "packages": {"torch": "2.13.0"}}


def run_of(folder: Path, before: dict[str, Any], now: dict[str, Any], patch: str = "") -> Run:
    run = Run(folder)
    earlier = run.earlier_attempt(1)
    earlier.mkdir(parents=True)
    (earlier / run.environment_file.name).write_text(json.dumps(before))
    run.environment_file.write_text(json.dumps(now))
    if patch:
        run.patch_file.write_text(patch)
    return run


@pytest.mark.parametrize(
    ("now", "patch", "said"),
    [
        ({}, "", ""),
        ({"host": "elsewhere", "cores": 8}, "", ""),
        ({"git": {"commit": "b" * 40}}, "", "commit aaaaaaaaaaaa -> bbbbbbbbbbbb"),
        ({"git": None}, "", "commit aaaaaaaaaaaa -> none"),
        ({"python": "3.12.1"}, "", "python 3.11.9 -> 3.12.1"),
        ({"packages": {"torch": "2.6.0", "onnx": "1.17"}}, "", "onnx none -> 1.17, torch 2.13.0 -> 2.6.0"),
        ({}, "diff", "changes that are in no commit (git.patch)"),
    ],
)
def test_what_differs_is_named(tmp_path: Path, now: dict[str, Any], patch: str, said: str) -> None:
    assert other_code(run_of(tmp_path, RECORD, RECORD | now, patch), 1) == said


def test_a_script_that_has_changed_is_named(tmp_path: Path) -> None:
    run = run_of(tmp_path, RECORD, RECORD)
    for folder, text in ((run.earlier_attempt(1), "lr = 1"), (run.path, "lr = 2")):
        (folder / "sources").mkdir()
        (folder / "sources" / "train.py").write_text(text)
    assert other_code(run, 1) == "train.py"


def test_a_first_attempt_and_a_record_that_is_lost_say_nothing(tmp_path: Path) -> None:
    run = run_of(tmp_path, RECORD, RECORD | {"git": None})
    assert other_code(run, 0) == ""
    (run.earlier_attempt(1) / run.environment_file.name).unlink()
    assert other_code(run, 1) == ""
