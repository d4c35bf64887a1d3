"""``ortlaunch doctor --fix``: runs the commands that mend what was found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ortlaunch.doctor.line import Line


def fix(lines: list[Line]) -> int:
    """Runs each mend once, in the order of the lines, and says each before.

    Args:
        lines: the report; lines whose mend needs a person are left.

    Returns:
        How many were run.
    """
    commands = list(dict.fromkeys(line.mend for line in lines if line.mend is not None and not line.by_hand))
    # The pip and the ortlaunch of this Python, whether or not its environment is active in this shell.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    for command in commands:
        print(f"mending: {command}", flush=True)
        result = subprocess.run(["bash", "-c", command], env={**os.environ, "PATH": path})
        if result.returncode != 0:
            print(f"         failed with exit code {result.returncode}", flush=True)
    return len(commands)
