"""The same numbers from every generator for the same seed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

import ortlaunch
from ortlaunch.trainer.seeds import seed_everything


def draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def test_python_numpy_and_torch_follow_the_seed() -> None:
    seed_everything(7)
    first = draw()
    assert all(one != other for one, other in zip(first, draw(), strict=True))
    seed_everything(7)
    assert draw() == first
    seed_everything(8)
    assert all(one != other for one, other in zip(first, draw(), strict=True))


_DROPOUT = """
import torch
from ortlaunch.config.schema import OrtConfig
from ortlaunch.ort import session
from ortlaunch.trainer.seeds import seed_everything

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)

    def forward(self, x):
        return torch.nn.functional.dropout(self.linear(x), 0.5, self.training)

def zeros(seed):
    seed_everything(seed)
    with torch.no_grad():
        model = Net()
        model.linear.weight.fill_(1.0)
    # Its own kernels, whose random numbers are not torch's.
    wrapped = session.wrap(model, OrtConfig(torch_kernels=False), threads=1, onnx_dir=None)
    seed_everything(seed + 1)
    return (wrapped(torch.ones(8, 64)) == 0).tolist()

session.import_ortmodule()
assert zeros(1) == zeros(1), "the same seed drops the same"
assert zeros(1) != zeros(5), "another seed drops others"
"""


@pytest.mark.ort
def test_onnx_runtimes_own_dropout_follows_the_seed(tmp_path: Path) -> None:
    # In a process of its own: sessions count their seeds on from what the process did before.
    environment = os.environ | {"PYTHONPATH": str(Path(ortlaunch.__file__).parents[1])}
    script = tmp_path / "dropout.py"
    script.write_text(_DROPOUT)
    result = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]


def test_determinism_is_switched_on_in_torch_and_cublas() -> None:
    script = (
        "import os, torch; from ortlaunch.trainer.seeds import make_deterministic; make_deterministic();"
        "assert torch.are_deterministic_algorithms_enabled();"
        "assert os.environ['CUBLAS_WORKSPACE_CONFIG'] == ':4096:8'; assert not torch.backends.cudnn.benchmark"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(ortlaunch.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", script], env=environment, timeout=100, check=True)
