"""Writes checkpoints beside the training: all workers copy their state, then a thread of each writes it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ortlaunch.base.errors import TrainingError
from ortlaunch.run.checkpoints import Store
from ortlaunch.trainer.checkpoint.host import save_file
from ortlaunch.trainer.checkpoint.torch_state import Write
from ortlaunch.trainer.workers import Workers, texts_of_all

ENGINE, WORKERS = "engine", "workers"
"""Folders in a checkpoint: what the engine wrote, and one file for each worker."""


@dataclass(frozen=True)
class Written:
    """How the writing of one checkpoint ended."""

    step: int
    seconds: float
    """From the copy in memory to the finished checkpoint."""
    error: str
    """What went wrong on some worker; empty for a checkpoint that is there."""


class Saver:
    """Saves the state of one worker together with all others; every worker makes the same calls in the same order."""

    def __init__(self, store: Store, workers: Workers, group: dist.ProcessGroup) -> None:
        """
        Args:
            store: the run's checkpoints; only the first worker writes into it.
            workers: this worker's place.
            group: all workers on the CPU, for this saver's thread alone.
        """
        self._store = store
        self._workers = workers
        self._group = group
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[Written] | None = None

    def save(
        self, step: int, snapshot: Callable[[Path], Write], own: dict[str, Any], meta: dict[str, Any]
    ) -> list[Written]:
        """Begins a checkpoint; returns when the state is copied.

        Args:
            step: the step that has ended.
            snapshot: copies the engine's state, given the folder that it will be written to.
            own: this worker's further state, plain values and tensors that nobody changes later.
            meta: facts about the checkpoint; the first worker's count.

        Returns:
            How earlier ones ended that had not been asked for yet: one is finished before the next begins.
        """
        ended = self.wait()
        partial = self._store.partial(step)
        write = snapshot(partial / ENGINE)
        self._pending = self._thread.submit(self._write, step, write, own, meta)
        return ended

    def ended(self) -> list[Written]:
        """How the last one ended, once; empty while it is being written. Waits for nothing."""
        return self.wait() if self._pending is not None and self._pending.done() else []

    def wait(self) -> list[Written]:
        """Waits for the last one; empty if there is none that was not asked for yet."""
        pending, self._pending = self._pending, None
        return [pending.result()] if pending is not None else []

    def _write(self, step: int, write: Write, own: dict[str, Any], meta: dict[str, Any]) -> Written:
        begin = time.perf_counter()
        partial = self._store.partial(step)
        file = partial / WORKERS / f"rank-{self._workers.rank}.pt"
        is_first = self._workers.is_first
        error = self._together(lambda: self._prepare(step) if is_first else None)
        error = error or self._together(lambda: write(self._group))
        error = error or self._together(lambda: save_file(own, file))
        error = error or self._together(lambda: self._store.commit(step, meta) if is_first else None)
        if error and is_first:
            self._store.abandon(step)
        return Written(step, time.perf_counter() - begin, error)

    def _prepare(self, step: int) -> None:
        partial = self._store.begin(step)
        for inner in (ENGINE, WORKERS):
            (partial / inner).mkdir()

    def _together(self, act: Callable[[], object]) -> str:
        """Acts, and tells and hears how it went on every worker; returns the first error."""
        try:
            act()
            mine = ""
        except BaseException as error:  # torch.distributed.checkpoint's own is no Exception.
            place = self._store.folder if self._store.folder.exists() else self._store.folder.parent
            free = shutil.disk_usage(place).free / 1e6
            # Errors that have come through torch's writer no longer say that the disk is full.
            mine = f"rank {self._workers.rank}: {_cause(error)} ({free:.0f} MB are free in {place})"
        return next(filter(None, texts_of_all(mine, self._group)), "")


def must_be_written(written: list[Written]) -> None:
    """Raises a TrainingError for a checkpoint that the run cannot end without."""
    for one in written:
        if one.error:
            raise TrainingError(f"the checkpoint of step {one.step} could not be written: {one.error}")


def _cause(error: BaseException) -> str:
    """The error that the others follow from, in words: what the disk said, where it said something."""
    failures = getattr(error, "failures", None)  # Of torch.distributed.checkpoint, by rank: (error, traceback).
    if isinstance(failures, dict) and failures:
        return _cause(next(iter(failures.values()))[0])
    chain = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(before)
    root = next((one for one in chain if isinstance(one, OSError)), chain[-1])
    text = str(root).strip().splitlines()
    return text[0] if text else type(root).__name__
