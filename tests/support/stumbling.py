"""A model whose second worker stumbles in its fifth step; how, a subclass says."""

from __future__ import annotations

NET = """
import os
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.out, self.calls = nn.Linear(64, 10), 0

    def forward(self, pixel_values):
        self.calls += 1
        if os.environ["RANK"] == "1" and self.calls == 5:
            self.stumble()
        return self.out(pixel_values.flatten(1))
"""
"""Source of its base class, for a file of the user's."""
WORDS = ("model=factory", "data=digits", "backend=eager", "train.steps=100000", "train.log_every=1")
"""What to call `ortlaunch` with, beside model.target."""
