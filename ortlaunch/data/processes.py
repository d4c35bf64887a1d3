"""The setup of a loader process: it uses one thread, blocks its worker's signals, and ends with its worker."""

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
"""With this niceness, the worker gets nine tenths of a core that it shares with a loader process."""


@contextmanager
def signals_held() -> Iterator[None]:
    """Blocks these signals in this thread. Processes that are forked in the context start with them blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, MEANT_FOR_THE_WORKER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_loader_process(number: int) -> None:
    """Sets up a new loader process. torch has already limited itself to one thread there.

    Ctrl-C, and SLURM at a time-out or preemption, signal every process of a step. The worker then decides how to end.
    It may still need data for its present step, and it closes its loader itself. A loader process therefore blocks
    these signals. It accepts SIGTERM only from its worker: torch ends a loader process that does not answer that way.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    # The workers have priority on the cores. The time that is left is enough to read data.
    os.nice(NICENESS)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.pthread_sigmask(signal.SIG_BLOCK, MEANT_FOR_THE_WORKER)
    # The worker recorded this before it forked. `os.getppid` would be wrong if the worker has died since.
    worker = multiprocessing.parent_process()
    assert worker is not None
    threading.Thread(target=_end_with_worker, args=(worker.pid,), daemon=True).start()


def _end_with_worker(worker: int) -> None:
    """Ends this process on the worker's SIGTERM or death, even while the main thread waits for a slow disk."""
    while os.getppid() == worker:
        received = signal.sigtimedwait({signal.SIGTERM}, POLL_SECONDS)
        if received is not None and received.si_pid == worker:
            break
    os._exit(0)
