"""transformers' models are imported without scipy, which their losses still find."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
from ortlaunch.models.registry import build_model
from ortlaunch.config.schema import ModelConfig

build_model(ModelConfig(name="gpt2_nano", params={"n_layer": 1}))
assert "scipy.optimize" not in sys.modules
from transformers.loss import loss_deformable_detr, loss_for_object_detection

for module in (loss_for_object_detection, loss_deformable_detr):
    rows, columns = module.linear_sum_assignment([[3, 1], [1, 5]])
    print(rows.tolist(), columns.tolist())
import scipy.optimize

print(scipy.optimize.linear_sum_assignment.__module__.partition(".")[0], scipy.optimize.minimize.__name__)
"""


def test_models_import_scipy_when_a_loss_calls_it() -> None:
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["[0, 1] [1, 0]", "[0, 1] [1, 0]", "scipy minimize"]
