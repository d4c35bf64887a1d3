"""Two processes of a test that are two workers."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable


def in_two(worker: Callable[..., None], *arguments: object) -> None:
    """Calls ``worker(rank, *arguments)`` in two processes; both must end well, and neither is left behind."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=worker, args=(rank, *arguments)) for rank in range(2)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(250)
            assert process.exitcode == 0
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
