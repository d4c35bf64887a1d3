"""``ortlaunch doctor --fix``: runs the commands that fix the reported problems."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ortlaunch.doctor.line import Line


def fix(lines: list[Line]) -> int:
    """Prints and runs each command once, in the order of the lines.

    Args:
        lines: the report; commands that need a person are not run.

    Returns:
        The number of commands that were run.
    """
    commands = list(dict.fromkeys(line.fix for line in lines if line.fix is not None and not line.by_hand))
    # These are the pip and the ortlaunch of this Python, even if its environment is not active in this shell.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    for command in commands:
        print(f"fixing: {command}", flush=True)
        result = subprocess.run(["bash", "-c", command], env={**os.environ, "PATH": path})
        if result.returncode != 0:
            print(f"        failed with exit code {result.returncode}", flush=True)
    return len(commands)
