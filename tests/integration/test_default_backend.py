"""Whole runs in a Python without onnxruntime-training: make test-python VERSION=3.12, make test-python VERSION=3.13."""

from __future__ import annotations

import pytest

from tests.support.ort import MISSING

pytestmark = pytest.mark.skipif(MISSING is None, reason="onnxruntime-training is installed, so the default is ort")


def test_a_run_that_names_no_backend_trains_in_eager_and_says_so(launch, tmp_path, mlflow_run):
    result = launch(tmp_path, "train.steps=3", "data.seq_len=32")
    assert result.returncode == 0, result.report
    (note,) = [line for line in result.stderr.splitlines() if line.startswith("note: ")]
    assert "backend=eager by default: backend=ort needs onnxruntime-training, which " in note
    _, run = mlflow_run(result)
    assert run.data.tags["ortlaunch.backend"] == "eager"
    assert run.data.tags["ortlaunch.backend_reason"] == note.removeprefix("note: ")
    assert run.data.tags["ortlaunch.ort_active"] == "false"


def test_compiled_runs_are_compared_with_eager_ones_in_a_bench(launch, tmp_path):
    words = ("backend=eager,compile,ort", "train.steps=4", "data.seq_len=32", "repeat=1")
    result = launch(tmp_path, "bench", *words)
    # That of ort is left out.
    assert result.returncode == 1, result.report
    assert "backend=ort is left out: backend=ort needs onnxruntime-training" in result.stderr
    assert {path.name.split("-")[3] for path in result.run_dirs} == {"eager", "compile"}
    table = [line for line in result.stdout.splitlines() if "FINISHED" in line]
    assert len(table) == 2, result.report
    assert "note:" not in result.stderr


def test_each_run_of_a_sweep_says_it(launch, tmp_path):
    result = launch(tmp_path, "model=mlp", "train.steps=2,3", "--multirun")
    assert result.returncode == 0, result.report
    assert result.stderr.count("note: backend=eager by default") == 2
    assert len(result.run_dirs) == 2
