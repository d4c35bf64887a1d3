"""Commands beside packages that people have installed; ``make test-neighbours`` puts them into a folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.environment import environment

FOLDER = os.environ.get("ORTLAUNCH_NEIGHBOURS", "")
MODEL = ("model=factory", "train.steps=2", "train.batch_size=4", "launcher.workers_per_node=1", "launcher.threads=1")
IMAGES = ("data=digits", "data.image_size=32")
TOKENS = ("data=pysource", "data.seq_len=32")
COMMANDS = {
    "the default": ("model=gpt2_nano", "train.steps=3"),
    "check": ("check", "model=resnet"),
    "timm": (*MODEL, "model.target=tests.neighbours.nets:Classifier", *IMAGES),
    "a ready job": ("+jobs=timm_digits", "train.steps=2", "launcher.workers_per_node=1"),
    "peft": (*MODEL, "model.target=tests.neighbours.nets:adapted", *TOKENS),
    "x-transformers": (*MODEL, "model.target=tests.neighbours.nets:Language", *TOKENS),
}


@pytest.mark.skipif(not FOLDER, reason="make test-neighbours installs the packages")
@pytest.mark.parametrize(
    "name", ["the default", "check", *(pytest.param(name, marks=pytest.mark.nightly) for name in list(COMMANDS)[2:])]
)
def test_a_command_works_beside_other_packages(name: str, tmp_path: Path) -> None:
    variables = environment()
    variables["PYTHONPATH"] += os.pathsep + FOLDER
    command = [sys.executable, "-m", "ortlaunch", *COMMANDS[name]]
    result = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stdout + result.stderr
    assert ("fit for ONNX Runtime" if name == "check" else "finished after") in result.stdout
