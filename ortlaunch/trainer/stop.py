"""Requests to stop, and how the workers agree on them without waiting for each other.

A signal only sets a flag; the first worker looks for a file ``STOP`` in the run folder. About once a second, and at
most once per step, the workers exchange two numbers in the background: an all-reduce that begins at the end of one step
is read at the end of the next, when it has long arrived. The numbers are whether a worker was asked to stop, and the
number of steps until the next exchange, so that all workers exchange at the same steps although their clocks differ.
An exchange at log steps would need no further collective, but with ``train.log_every=1000`` a request would wait longer
than a scheduler does.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ortlaunch.base.files import is_there
from ortlaunch.run.run import Run

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SECONDS = 1.0
_MOST_STEPS = 1000.0


class StopRequests:
    """This worker's view of the requests to stop the run."""

    def __init__(
        self,
        run_dir: Path,
        group: dist.ProcessGroup,
        *,
        is_first: bool,
        grace_seconds: float,
        signals: Sequence[signal.Signals] = (),
    ) -> None:
        """
        Args:
            run_dir: the run folder.
            group: all workers on the CPU; no other collective may run in it meanwhile.
            is_first: whether this worker looks for the file.
            grace_seconds: how long after a signal this process ends, even in the middle of a step.
            signals: those that ask to stop beside the usual ones.
        """
        self._signals = {*_SIGNALS, *signals}
        self._file = Run(run_dir).stop_file
        self._group = group
        self._is_first = is_first
        self._grace = grace_seconds
        self._asked = False
        self._exchange: dist.Work | None = None
        self._numbers = torch.zeros(2)
        self._between = 1
        """Steps from the last exchange to the next one."""
        self._steps_left = 1
        self._last = time.monotonic()
        self._steps = 0

    def listen(self) -> None:
        """Handles the signals that ask to stop; until then they end the process."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        for number in self._signals:
            signal.signal(number, self._note)
        # Python's C handler writes to the pipe even while the main thread is inside a collective that never ends.
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._end_in_time, args=(reader,), daemon=True).start()

    def ask(self) -> None:
        """Asks as a signal would."""
        self._asked = True

    @property
    def _is_asked(self) -> bool:
        """Whether this worker knows of a request; the others may not know of it yet."""
        # `Path.exists` raises for a file system that errs once (ESTALE, EIO), which must not end the training.
        return self._asked or (self._is_first and is_there(self._file))

    def agreed(self) -> bool:
        """Whether all workers stop here; all of them call it at the end of every step."""
        self._steps += 1
        if self._exchange is not None:
            self._exchange.wait()
            self._exchange = None
            if self._numbers[0] > 0:
                return True
            self._steps_left = self._between = int(-self._numbers[1])
        self._steps_left -= 1
        if self._steps_left <= 0:
            self._ask()
        return False

    def close(self) -> None:
        """Waits for the exchange in progress, so that the process groups can be destroyed; all workers call it."""
        if self._exchange is not None:
            self._exchange.wait()
            self._exchange = None

    def _ask(self) -> None:
        now = time.monotonic()
        pace = (now - self._last) / self._steps
        self._last, self._steps = now, 0
        # One quick step, such as a script's first, says little of those to come.
        steps = min(_MOST_STEPS, 2.0 * self._between, max(1.0, _SECONDS / max(pace, 1e-6)))
        # The maximum of each: one request is enough, and the earliest next exchange counts.
        self._numbers = torch.tensor([float(self._is_asked), -float(int(steps))])
        self._exchange = dist.all_reduce(self._numbers, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def _note(self, _number: int, _frame: Any) -> None:
        self._asked = True

    def _end_in_time(self, reader: int) -> None:
        # The pipe gets every signal that has a handler in Python. With loader processes torch has one for SIGCHLD, and
        # the end of a loader process is no request to stop.
        while (number := os.read(reader, 1)[0]) not in self._signals:
            pass
        time.sleep(self._grace)
        os._exit(128 + number)
