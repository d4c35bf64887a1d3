"""How a loader process behaves: one thread, deaf to what is meant for its worker, gone when its worker is gone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

MEANT_FOR_THE_WORKER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
POLL_SECONDS = 1.0
NICENESS = 10
"""A core that both want goes to the trainer for nine tenths of the time."""


@contextmanager
def signals_held() -> Iterator[None]:
    """Delays signals of this thread; processes forked meanwhile start with them blocked, without a gap."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, MEANT_FOR_THE_WORKER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_loader_process(number: int) -> None:
    """Settles a fresh loader process; torch has set its own threads to one already.

    Ctrl-C, and SLURM on time-out or preemption, signal every process of a step. The worker decides then how to end,
    may still need data for the step it is in, and closes its loader; so a loader process blocks these signals. It
    obeys SIGTERM from its worker alone, which is how torch ends a loader process that does not answer.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    # The trainers have the cores; what they leave is enough to read.
    os.nice(NICENESS)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.pthread_sigmask(signal.SIG_BLOCK, MEANT_FOR_THE_WORKER)
    # Noted by the worker before it forked: asking for the parent here is too late where the worker died meanwhile.
    worker = multiprocessing.parent_process()
    assert worker is not None
    threading.Thread(target=_end_with_worker, args=(worker.pid,), daemon=True).start()


def _end_with_worker(worker: int) -> None:
    """Leaves when the worker says so or is gone, even while the main thread waits for a slow disk."""
    while os.getppid() == worker:
        received = signal.sigtimedwait({signal.SIGTERM}, POLL_SECONDS)
        if received is not None and received.si_pid == worker:
            break
    os._exit(0)
