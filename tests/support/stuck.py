"""A model that trains for two steps and never ends the third."""

from __future__ import annotations

from pathlib import Path

_NETS = """
import time
from torch import nn

class Stuck(nn.Module):
    def __init__(self):
        super().__init__()
        self.out, self.calls = nn.Linear(64, 10), 0

    def forward(self, pixel_values):
        self.calls += 1
        if self.calls > 2:
            time.sleep(1000)
        return self.out(pixel_values.flatten(1))
"""


def stuck_model(folder: Path) -> tuple[str, ...]:
    """Writes its source into the folder of work; returns what to call `ortlaunch` with there."""
    (folder / "nets.py").write_text(_NETS)
    words = ("model=factory", "model.target=nets:Stuck", "data=digits", "backend=eager", "train.log_every=1")
    return (*words, "tracking=none")
