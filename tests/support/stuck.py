"""Models whose workers stand still: one in its third step, one while it loads."""

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

_LOADING = """
import time
from pathlib import Path
from torch import nn

here = Path(__file__).parent
(here / "loading").touch()
while not (here / "go").exists():
    time.sleep(0.05)

class Loading(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(64, 10)

    def forward(self, pixel_values):
        return self.out(pixel_values.flatten(1))
"""


def stuck_model(folder: Path) -> tuple[str, ...]:
    """Writes the source of a model into the folder of work; returns what to call `ortlaunch` with there.

    It trains for two steps and never ends the third.
    """
    return _written(folder, "nets", _NETS, "Stuck")


def loading_model(folder: Path) -> tuple[str, ...]:
    """Writes the source of a model into the folder of work; returns what to call `ortlaunch` with there.

    Its import makes the file ``loading`` there, and ends when there is a file ``go``.
    """
    return _written(folder, "loading_nets", _LOADING, "Loading")


def _written(folder: Path, module: str, source: str, name: str) -> tuple[str, ...]:
    (folder / f"{module}.py").write_text(source)
    words = ("model=factory", f"model.target={module}:{name}", "data=digits", "backend=eager", "train.log_every=1")
    return (*words, "tracking=none")
