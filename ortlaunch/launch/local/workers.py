"""Starts torchrun and its workers as one group of processes, reads their output, and ends them in any case."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from ortlaunch.base.processes import WARNINGS, Mark, die_with_parent
from ortlaunch.launch.plan import Start

_TERMINATE_SECONDS = 10.0
_END_SECONDS = 0.1
"""A process that has closed its output ends soon."""


class WorkerGroup:
    """torchrun and all processes below it."""

    def __init__(self, start: Start, log_file: Path, started: float) -> None:
        """Starts torchrun.

        Args:
            start: the command and its variables.
            log_file: takes its standard error.
            started: when the run was started, in seconds since the epoch; start-up times count from it.
        """
        self._mark = Mark()
        variables = {**os.environ, **start.environment, **self._mark.variables(), "ORTLAUNCH_STARTED": repr(started)}
        self.was_ended = False
        """Whether this object has ended the processes, or has begun to."""
        self._lines: queue.Queue[str] = queue.Queue()
        with open(log_file, "wb") as log:
            # The group has its own session, so Ctrl-C reaches only the launcher, which then stops the workers in order.
            self._process = subprocess.Popen(
                start.command,
                env=variables,
                stdout=subprocess.PIPE,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_begin,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def poll(self) -> int | None:
        """Returns torchrun's exit code once it has ended and its output was read; None before."""
        code = self._process.poll()
        if code is not None:
            # A killed torchrun may leave workers that hold the pipe open, so the wait is limited. `kill` ends them.
            self._reader.join(timeout=2.0)
        return code

    def wait(self, seconds: float) -> None:
        """Waits for this long, or until torchrun and its workers have closed their output, as they do at their end."""
        if self._reader.is_alive():
            self._reader.join(seconds)
        else:
            time.sleep(min(seconds, _END_SECONDS))

    def lines(self) -> Iterator[str]:
        """Yields the lines that rank 0 printed since the last call."""
        while True:
            try:
                yield self._lines.get_nowait()
            except queue.Empty:
                return

    def terminate(self) -> None:
        """Asks torchrun to stop its workers, and ends those that have not stopped after `_TERMINATE_SECONDS`."""
        self.was_ended = True
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(timeout=_TERMINATE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Ends every process of the group that is still there."""
        self.was_ended = True
        # torchrun is killed first, so that it does not report the end of a worker as a failure.
        self._process.kill()
        for process in self._mark.processes():
            with suppress(psutil.Error):
                process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self._lines.put(line.decode(errors="replace").rstrip("\n"))


def _begin() -> None:
    """Is called in torchrun's process before its program begins."""
    die_with_parent()
    # A scheduler may send its warning to every process of a job. Only the launcher takes it, as a request to stop.
    for number in WARNINGS:
        signal.signal(number, signal.SIG_IGN)
