"""A model that ONNX Runtime cannot run: refused loudly by default, trained in PyTorch and marked so on request."""

from __future__ import annotations

import pytest

NETS = """
import torch
from torch import nn

class Spectrum(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, pixel_values):
        return self.out(0.1 * torch.fft.hfft(self.hidden(pixel_values.flatten(1)), 64))
"""
OPERATOR = "aten::fft_hfft"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fallback")
    (folder / "nets.py").write_text(NETS)
    return folder


WORDS = ("model=factory", "model.target=nets:Spectrum", "data=digits", "train.batch_size=32", "train.steps=40")


@pytest.fixture(scope="module")
def warned(launch, folder):
    return launch(folder, *WORDS, "optimizer.lr=0.01", "backend.fallback=warn")


def test_the_run_stops_by_default_and_names_the_operator(train, folder):
    result = train(folder, *WORDS, "tracking=none")
    assert result.status == "FAILED" and result.is_request
    assert OPERATOR in result.error
    assert result.losses == {}


def test_warn_trains_in_pytorch_and_the_run_says_so(warned, mlflow_run):
    """ort_active=false and the reason are tags, and a warning stands on the terminal."""
    assert warned.returncode == 0, warned.report
    assert warned.losses[40] < 0.9 * warned.losses[1]
    run = mlflow_run(warned)[1]
    assert run.info.status == "FINISHED"
    assert run.data.tags["ortlaunch.ort_active"] == "false"
    assert run.data.tags["ortlaunch.fallback_reason"]
    assert "warning: ONNX Runtime is NOT active" in warned.stdout


def test_the_reason_names_the_operator(warned):
    assert OPERATOR in warned.tags["ortlaunch.fallback_reason"]
    assert OPERATOR in warned.stdout


def test_compare_marks_the_run(warned, ask):
    """The table must not pass PyTorch's figures off as ONNX Runtime's."""
    result = ask(warned.cwd, "compare", str(warned.run_dir))
    assert result.returncode == 0, result.stderr
    assert "ortlaunch.ort_active=false" in result.stdout
