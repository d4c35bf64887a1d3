"""What the tests on a GPU share: the reason why they skip, and whole runs on CUDA."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Train = Callable[..., dict[str, Any]]

_SIZE = ("model=gpt2_nano", *(f"model.params.{kind}_pdrop=0" for kind in ("resid", "embd", "attn")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips all of this folder where there is no GPU, with the reason."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=f"torch {torch.__version__} sees no CUDA device"))


@pytest.fixture(scope="session")
def ort_on_cuda() -> None:
    """Skips where ONNX Runtime cannot run on this machine's GPU."""
    from ortlaunch.base.errors import RequestError
    from ortlaunch.ort import cuda_libs

    try:
        cuda_libs.require()
    except RequestError as error:
        pytest.skip(str(error))


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Trains gpt2_nano on CUDA without dropout; returns the journal's last values of all metrics and tags, and the
    losses by step under ``losses``."""

    def run(*overrides: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "ortlaunch", *_SIZE, "device=cuda", "tracking=none", "train.log_every=1"]
        result = subprocess.run(
            [*command, "train.steps=20", *overrides], cwd=tmp_path, capture_output=True, text=True, timeout=280
        )
        assert result.returncode == 0, result.stderr
        journal = max(tmp_path.glob("runs/*/*/journal.jsonl"), key=lambda path: path.stat().st_mtime)
        values: dict[str, Any] = {"losses": {}}
        for event in map(json.loads, journal.read_text().splitlines()):
            if event["event"] in ("metrics", "tags"):
                values |= event["values"]
            if event["event"] == "metrics" and "train/loss" in event["values"]:
                values["losses"][event["step"]] = event["values"]["train/loss"]
        return values

    return run
