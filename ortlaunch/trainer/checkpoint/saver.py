"""Writes checkpoints during the training. Each worker copies its state, then a thread of it writes the copy."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from ortlaunch.base.errors import TrainingError
from ortlaunch.run.checkpoints import Store, name_of
from ortlaunch.trainer.checkpoint import own_buffers
from ortlaunch.trainer.checkpoint.host import HostMemory, save_file
from ortlaunch.trainer.checkpoint.own_buffers import OwnBuffers, Saved
from ortlaunch.trainer.checkpoint.torch_state import Write
from ortlaunch.trainer.workers import Workers, values_of_all

ENGINE, WORKERS = "engine", "workers"
"""The folders in a checkpoint: one for the engine's files, and one with a file for each worker."""
BUFFERS = "buffers"
"""In a worker's file: the buffers that the engine's files lack. In ``run.json``: the names of those in which a worker
differed from the first one."""


@dataclass(frozen=True)
class Written:
    """The result of writing one checkpoint."""

    step: int
    seconds: float
    """The time from the copy in memory to the finished checkpoint."""
    error: str
    """The error of some worker; empty if the checkpoint was written."""
    untidy: str = ""
    """Why the links or the earlier checkpoints were left as they were; empty if they were not. For the first worker."""


class Snapshot(Protocol):
    """Copies an engine's state; see `Engine.snapshot`."""

    def __call__(self, folder: Path, *, shared: bool, memory: HostMemory) -> Write:
        """Returns a function that writes the copy to the folder."""
        ...


class Saver:
    """Saves this worker's state together with the others'. All workers must make the same calls in the same order."""

    def __init__(
        self,
        store: Store,
        workers: Workers,
        group: dist.ProcessGroup,
        buffers: OwnBuffers | None = None,
        *,
        sends_buffers: bool = False,
    ) -> None:
        """
        Args:
            store: the run's checkpoints. Only the first worker creates and commits them.
            workers: this worker's place.
            group: a process group of all workers on the CPU, which only this saver's thread uses.
            buffers: this worker's; None where the engine's state has all that counts.
            sends_buffers: as `Engine.sends_buffers`.
        """
        self._store = store
        self._workers = workers
        self._group = group
        self._buffers = buffers
        self._each_has_own = workers.world_size > 1 and not sends_buffers
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[Written] | None = None
        self._memory = HostMemory()

    def save(
        self,
        step: int,
        snapshot: Snapshot,
        own: dict[str, Any],
        meta: dict[str, Any],
        refusal: str = "",
        *,
        shared: bool,
        keep_memory: bool,
    ) -> list[Written]:
        """Begins a checkpoint, and returns when the state has been copied.

        It first waits for the previous checkpoint to be finished.

        Args:
            step: the step that has ended.
            snapshot: copies the engine's state.
            own: this worker's further state, as plain values and as tensors that do not change later.
            meta: facts about the checkpoint. Only the first worker's are used.
            refusal: why this worker's state must not be kept, which then is the error of the checkpoint; empty if it
                may be.
            shared: whether the state stays as it is until it is written. What is in host memory is not copied then.
            keep_memory: whether the memory of the copy is kept for the next checkpoint; otherwise it is given back
                when the checkpoint is written.

        Returns:
            The result of the previous checkpoint, if no call has returned it yet.
        """
        ended = self.wait()
        partial = self._store.partial(step)
        # The previous checkpoint is written, or has failed: nothing reads its copy any more.
        with self._memory.copying(keep=keep_memory):
            write = snapshot(partial / ENGINE, shared=shared, memory=self._memory)
            copied = self._copied_buffers(shared)
        self._pending = self._thread.submit(self._write, step, write, copied, own, meta, refusal)
        return ended

    def ended(self) -> list[Written]:
        """The result of the last checkpoint, which is returned once; empty while it is being written."""
        return self.wait() if self._pending is not None and self._pending.done() else []

    def wait(self, seconds: float | None = None) -> list[Written]:
        """Waits for the last checkpoint and returns its result; empty if a call has returned it already.

        Args:
            seconds: the longest wait, after which nothing is returned; None for any.
        """
        pending, self._pending = self._pending, None
        return [pending.result()] if pending is not None and wait([pending], seconds).done else []

    def _copied_buffers(self, shared: bool) -> Saved:
        """Copies of the buffers that this worker may have to save beside the engine's state."""
        if self._buffers is None or not (self._each_has_own or self._workers.is_first):
            return {}
        return self._buffers.copied(all_of_them=self._each_has_own, shared=shared, memory=self._memory)

    def _write(
        self, step: int, write: Write, copied: Saved, own: dict[str, Any], meta: dict[str, Any], refusal: str
    ) -> Written:
        begin = time.perf_counter()
        partial = self._store.partial(step)
        file = partial / WORKERS / f"rank-{self._workers.rank}.pt"
        is_first = self._workers.is_first
        error = self._together(lambda: self._prepare(step, refusal))
        error = error or self._together(lambda: write(self._group))
        digests: dict[str, str] = {}
        error = error or self._together(
            lambda: digests.update((name, own_buffers.digest(one["value"])) for name, one in copied.items())
        )
        saved, differing = ({}, []) if error else self._buffers_to_save(copied, digests)
        error = error or self._together(lambda: save_file({**own, BUFFERS: saved}, file))
        facts = {**meta, BUFFERS: differing}
        error = error or self._together(lambda: self._store.commit(step, facts) if is_first else None)
        untidy = ""
        if error and is_first:
            self._store.abandon(step)
        elif is_first:
            untidy = self._tidied(step)
        return Written(step, time.perf_counter() - begin, error, untidy)

    def _buffers_to_save(self, copied: Saved, digests: dict[str, str]) -> tuple[Saved, list[str]]:
        """Returns the buffers that this worker saves, and the names of those in which a worker differs from the first.

        All workers must call it.
        """
        everyone = values_of_all(digests, self._group) if self._each_has_own else [digests]
        names = sorted({name for one in everyone for name in own_buffers.differing(one, everyone[0])})
        if not self._workers.is_first:
            return {name: copied[name] for name in own_buffers.differing(digests, everyone[0])}, names
        return (self._buffers.changed(copied, digests) if self._buffers is not None else {}), names

    def _tidied(self, step: int) -> str:
        """Brings links and earlier checkpoints up to date; returns why that failed, empty if it did not."""
        try:
            self._store.tidy(self._store.folder / name_of(step))
        except OSError as error:
            return f"{error.filename or self._store.folder}: {error.strerror or error}"
        return ""

    def _prepare(self, step: int, refusal: str) -> None:
        if refusal:
            raise TrainingError(refusal)
        if not self._workers.is_first:
            return
        partial = self._store.begin(step)
        for inner in (ENGINE, WORKERS):
            (partial / inner).mkdir()

    def _together(self, act: Callable[[], object]) -> str:
        """Runs an action on every worker, exchanges the errors, and returns the first one; empty if there is none."""
        try:
            act()
            mine = ""
        except TrainingError as error:
            mine = f"rank {self._workers.rank}: {error}"
        except BaseException as error:  # CheckpointException of torch.distributed.checkpoint is no Exception.
            place = self._store.folder if self._store.folder.exists() else self._store.folder.parent
            free = shutil.disk_usage(place).free / 1e6
            # An error that torch's writer passes on may no longer say that the disk is full.
            mine = f"rank {self._workers.rank}: {_cause(error)} ({free:.0f} MB are free in {place})"
        return next(filter(None, values_of_all(mine, self._group)), "")


def must_be_written(written: list[Written]) -> None:
    """Raises a TrainingError if a checkpoint that the run needs was not written."""
    for one in written:
        if one.error:
            raise TrainingError(f"the checkpoint of step {one.step} could not be written: {one.error}")


def _cause(error: BaseException) -> str:
    """The first line of the error's root cause. An OSError in the chain, such as a full disk, takes precedence."""
    failures = getattr(error, "failures", None)  # torch.distributed.checkpoint's errors by rank: (error, traceback).
    if isinstance(failures, dict) and failures:
        return _cause(next(iter(failures.values()))[0])
    chain = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(before)
    root = next((one for one in chain if isinstance(one, OSError)), chain[-1])
    text = str(root).strip().splitlines()
    return text[0] if text else type(root).__name__
