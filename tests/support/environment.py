"""The environment of the commands that tests start."""

from __future__ import annotations

import os
from pathlib import Path

import ortlaunch

_FOREIGN = ("MLFLOW_TRACKING_URI", "HYDRA_FULL_ERROR", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK")
"""Variables that would change a run: the user's, or those that a test has left in this process."""


def environment() -> dict[str, str]:
    """Returns this process's environment without what would change a run, and with the ortlaunch that tests import."""
    variables = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    paths = [str(Path(ortlaunch.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return variables | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUTF8": "1"}
