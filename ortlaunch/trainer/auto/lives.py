"""The lives of a worker's process: it may replace itself by a new program, which begins the run again.

So a run that changes its backend computes what a run computes that had this backend from the beginning: nothing that a
library has imported, patched or drawn is left. The process keeps its number, and torchrun notices nothing.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from ortlaunch.base import output
from ortlaunch.trainer.workers import STORE

_LIFE = "ORTLAUNCH_LIFE"


def life() -> int:
    """How often this process has begun the run again since torchrun started it."""
    return int(os.environ.get(_LIFE, "0"))


def is_first_start(attempt: int, start_step: int) -> bool:
    """Whether the time from the launch to the first step is that of one start.

    Args:
        attempt: how often torchrun and the scheduler have restarted the workers.
        start_step: the steps of the checkpoint that the run goes on from.
    """
    return attempt == 0 and start_step == 0 and life() == 0


def begin_again(environment: Mapping[str, str]) -> None:
    """Replaces this process by one that begins the run again; any thread may call it, and it does not return.

    Args:
        environment: the variables that this process was started with.
    """
    number = life() + 1
    # Processes that read data or compile are children of this process, and would outlive what they worked for.
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.send_signal(signal.SIGKILL)
    sys.stdout.flush()
    sys.stderr.flush()
    output.give_back()
    for path in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):
            if int(path.name) > 2:
                os.set_inheritable(int(path.name), False)
    program = [sys.executable, *sys.orig_argv[1:]]
    # The other life's connections are named apart from this one's.
    variables = {**environment, _LIFE: str(number), STORE: f"/life-{number}"}
    os.execve(Path(sys.executable), program, variables)
