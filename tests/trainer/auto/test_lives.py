"""A process that begins again: the same process, with nothing left of what it had."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.environment import environment

PROGRAM = """
import os, subprocess, sys, time
from pathlib import Path
from ortlaunch.base import output
from ortlaunch.trainer.auto.lives import begin_again, life

at_start = dict(os.environ)
output.redirect(Path("log"), to_terminal=True)
held = {int(name) for name in os.listdir("/proc/self/fd")}
if life() == 0:
    os.environ["LEFT"] = "over"
    child = subprocess.Popen(["sleep", "600"])
    os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)
    print("first", os.getpid(), child.pid, len(held))
    begin_again(at_start)
print("second", os.getpid(), os.environ.get("LEFT"), os.environ["ORTLAUNCH_STORE"], len(held), *sys.argv[1:])
"""


def test_a_process_begins_again_with_its_number_its_terminal_and_its_first_variables(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-u", "-c", PROGRAM, "RUN_DIR"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    first, second = (line.split() for line in result.stdout.splitlines())
    assert second == ["second", first[1], "None", "/life-1", first[3], "RUN_DIR"]
    assert (tmp_path / "log").read_text() == result.stdout
    child = Path("/proc", first[2], "cmdline")
    assert not child.exists() or child.read_bytes() == b""
