"""The command as a user types it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def ortlaunch(cwd: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``ortlaunch ARGUMENTS...`` in a folder, with further variables, to its end: for what trains nothing."""
    return subprocess.run(
        [sys.executable, "-m", "ortlaunch", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
