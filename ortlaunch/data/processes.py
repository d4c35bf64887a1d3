"""How a loader process behaves: one thread, deaf to what is meant for its worker, gone when its worker is gone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading

MEANT_FOR_THE_WORKER = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
POLL_SECONDS = 1.0


def start_loader_process(number: int) -> None:
    """Settles a fresh loader process; torch has set its own threads to one already.

    Ctrl-C, and SLURM on time-out or preemption, signal every process of a step. The worker decides then how to end,
    may still need data for the step it is in, and closes its loader; so a loader process ignores these signals. It
    obeys SIGTERM from its worker alone, which is how torch ends a loader process that does not answer.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for ignored in MEANT_FOR_THE_WORKER:
        signal.signal(ignored, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    parent = multiprocessing.parent_process()
    owner = os.getppid() if parent is None or parent.pid is None else parent.pid
    threading.Thread(target=_end_with_owner, args=(owner, os.getppid()), daemon=True).start()


def _end_with_owner(owner: int, parent: int) -> None:
    """Leaves when the owner says so or the parent is gone, even while the main thread waits for a slow disk."""
    while os.getppid() == parent:
        received = signal.sigtimedwait({signal.SIGTERM}, POLL_SECONDS)
        if received is not None and received.si_pid == owner:
            break
    os._exit(0)
