"""Watches a script's workers on one node, from a thread of the program around torchrun.

A script knows nothing of a run folder. So this thread does what the workers of ortlaunch's own loop do themselves: it
writes their signs of life, hands a request to stop on to them as a signal, ends them when nothing goes on, and notes
how they ended and whether they exchanged anything. What the first worker prints it shows on the terminal.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from ortlaunch.base.awake import AwakeClock, why_not_running
from ortlaunch.base.errors import TrainingError
from ortlaunch.base.files import replace_text, size_of
from ortlaunch.base.processes import Mark
from ortlaunch.launch.exchange import Exchange
from ortlaunch.metrics.gpu import gpu_of_worker
from ortlaunch.run.identity import machine
from ortlaunch.run.run import Run, Stopped
from ortlaunch.run.state import APART_TAG

_POLL_SECONDS = 0.25
_SAMPLE_SECONDS = 2.0
_IDLE_SHARE, _IDLE_SECONDS = 0.02, 0.05
"""A worker that uses less of a core than this share, and this much more, does nothing but wait."""
_WEIGHING_SHARE = 0.01
"""How much of the time may go into weighing the memory of a worker's children."""
_ABORT_SECONDS = 10.0
"""How long a worker may take to write its stacks."""
_MOST_SHOWN = 1 << 20
"""Bytes of output that are shown at once. A script that prints more has all of it in its log."""
_GIB = 2.0**30


class _Worker:
    """A process that torchrun has started, with all that it has started itself."""

    def __init__(self, process: psutil.Process, variables: dict[str, str], now: float) -> None:
        """
        Args:
            process: the process.
            variables: its environment.
            now: the time on the watch's clock.
        """
        self.process = process
        self.variables = variables
        self.rank = int(variables["RANK"])
        self.rss = self.peak = self.cpu = self.load = 0.0
        self._gpu = gpu_of_worker(variables)
        self._of_gpu: dict[str, float] = {}
        self._beside = 0.0
        self._weighed_next = now
        self.moved = now
        """When it last did something, on the watch's clock."""
        self._sampled = now
        self._mark = (0.0, 0)
        """Its processor time and the size of its log when it last did something."""

    def sample(self, now: float, log_bytes: int) -> None:
        """Measures it.

        Args:
            now: the time on the watch's clock.
            log_bytes: the size of its log.
        """
        cpu = 0.0
        children = self.process.children(recursive=True)
        for one in [self.process, *children]:
            with suppress(psutil.Error):
                times = one.cpu_times()
                cpu += times.user + times.system
        rss = self.process.memory_info().rss + self._memory_beside(children, now)
        passed = now - self._sampled
        self.load = 100.0 * max(0.0, cpu - self.cpu) / passed if passed > 0 else self.load
        self.rss, self.peak, self.cpu, self._sampled = rss, max(self.peak, rss), cpu, now
        busy = cpu - self._mark[0] > _IDLE_SHARE * (now - self.moved) + _IDLE_SECONDS
        if self._gpu is not None:
            percent, _, mib, _ = self._gpu.read()
            peak = max(mib / 1024, self._of_gpu.get("gpu_peak_gib", 0.0))
            named = {"gpu_percent": percent, "gpu_gib": mib / 1024, "gpu_peak_gib": peak}
            self._of_gpu = {name: value for name, value in named.items() if value == value}
        # A loader process that has ended takes its time along.
        if busy or cpu < self._mark[0] or log_bytes != self._mark[1]:
            self.moved, self._mark = now, (cpu, log_bytes)

    def _memory_beside(self, children: list[psutil.Process], now: float) -> float:
        """The memory that its children do not share with it. A forked loader process shares most of its own."""
        if now >= self._weighed_next:
            begun = time.perf_counter()
            self._beside = 0.0
            for one in children:
                with suppress(psutil.Error):
                    self._beside += one.memory_full_info().uss
            # The kernel counts page by page.
            self._weighed_next = now + (time.perf_counter() - begun) / _WEIGHING_SHARE
        return self._beside

    def beat(self) -> dict[str, Any]:
        """Returns its sign of life."""
        return {
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": self.process.pid,
            "beats": round(self.moved),
            "step": 0,
            "time": time.time(),
            "machine": machine(),
            "moved": time.time() - self._sampled + self.moved,
            "rss_gib": self.rss / _GIB,
            "peak_gib": self.peak / _GIB,
            "cpu_percent": self.load,
            **self._of_gpu,
        }


class ScriptWatch:
    """The watch over the workers that this process starts."""

    def __init__(self, run: Run) -> None:
        """
        Args:
            run: the run, whose folder exists.
        """
        self._run = run
        self._mark = Mark()
        self._clock = AwakeClock()
        self._sampled = -_SAMPLE_SECONDS
        self._workers: dict[int, _Worker] = {}
        self._ranks: set[int] = set()
        """The ranks of all workers so far."""
        self._signalled: set[int] = set()
        self._asked: float | None = None
        """When the workers were asked to stop, on the clock."""
        self._aborted: float | None = None
        self._exchange = Exchange()
        self._shown = size_of(run.rank_log(0))
        self._node = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._work, name="script-watch", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        os.environ |= self._mark.variables()
        self._thread.start()

    def end(self, *, in_order: bool) -> None:
        """Ends the thread, and notes how the workers have ended.

        Args:
            in_order: whether all of them had exit code 0.
        """
        self._done.set()
        self._thread.join(timeout=2 * _SAMPLE_SECONDS)
        self._end_what_is_left()
        self._show()
        for rank in self._ranks:
            with suppress(OSError):
                self._run.beat_file(rank).unlink(missing_ok=True)
        with suppress(OSError):
            if self._node == 0 and self._run.artifacts.is_dir():
                with self._run.journal() as journal:
                    journal.artifact(self._run.artifacts)
            if self._asked is not None:
                # A script that is attached has noted it with its checkpoint, or that all its steps were done by then.
                if self._node == 0 and not (self._run.stopped_file.exists() or self._run.is_done()):
                    self._run.note_stopped(Stopped(0, "", self._run.stop_word() or "signal"))
            elif in_order and not self._run.stopped_file.exists():
                self._say_apart()
                self._note_done()

    def _end_what_is_left(self) -> None:
        """Ends the processes that the workers have left behind."""
        for process in self._mark.processes():
            with suppress(psutil.Error):
                process.kill()

    def _say_apart(self) -> None:
        """Says that the workers have exchanged nothing, where that is known."""
        if self._node or not (why := self._exchange.said()):
            return
        with self._run.journal() as journal:
            journal.tags({APART_TAG: why})
        print(f"ortlaunch: the workers exchanged nothing ({why}): each trained a copy of its own", flush=True)

    def _note_done(self) -> None:
        """Notes that the script has ended in order, once it has on all nodes."""
        nodes = self._run.setting("launcher.nodes")
        if nodes != 1:
            self._run.health.mkdir(exist_ok=True)
            self._run.node_done_file(self._node).touch()
            if not all(self._run.node_done_file(node).exists() for node in range(nodes)):
                return
        if not self._run.is_done():
            self._run.note_done(0)

    def _work(self) -> None:
        while not self._done.wait(_POLL_SECONDS):
            # Nothing that fails here may end the script: a folder that is gone, a process that has ended.
            with suppress(Exception):
                self._clock.tick()
                self._look()
            with suppress(Exception):
                variables = {pid: worker.variables for pid, worker in self._workers.items()}
                self._exchange.look(variables, self._clock.seconds)

    def _look(self) -> None:
        now = self._clock.seconds
        self._find(now)
        self._show()
        self._stop(now)
        if now - self._sampled < _SAMPLE_SECONDS or not self._workers:
            return
        self._sampled = now
        self._run.health.mkdir(exist_ok=True)
        for worker in list(self._workers.values()):
            with suppress(psutil.Error):
                worker.sample(now, size_of(self._run.rank_log(worker.rank)))
            # A script that is attached gives its own signs of life, without this.
            if not why_not_running(worker.process.pid) and "moved" in (self._run.beat(worker.rank) or worker.beat()):
                replace_text(self._run.beat_file(worker.rank), json.dumps(worker.beat()))
        self._end_a_hang(now)

    def _find(self, now: float) -> None:
        """Finds the workers among the processes that torchrun has started. After a restart they are others."""
        children = {child.pid: child for child in psutil.Process().children()}
        for pid in self._workers.keys() - children.keys():
            del self._workers[pid]
        for pid in children.keys() - self._workers.keys():
            with suppress(psutil.Error):
                own = children[pid].environ()
                if "RANK" not in own or own.get("ORTLAUNCH_RUN_DIR") != str(self._run.path):
                    continue
                self._workers[pid] = _Worker(children[pid], own, now)
                self._ranks.add(self._workers[pid].rank)
                self._node = int(own.get("GROUP_RANK", "0"))
                self._run.node_done_file(self._node).unlink(missing_ok=True)

    def _stop(self, now: float) -> None:
        """Hands a request to stop on to the workers, to each once, and ends those that do not follow it."""
        if self._asked is None and not self._run.stop_file.exists() and not self._run.stopped_file.exists():
            return
        # It comes too late for workers that have ended.
        if self._ranks and not self._workers:
            return
        if self._asked is None:
            self._asked = now
        if now - self._asked > float(self._run.setting("launcher.grace_seconds") or 0):
            print("ortlaunch: the script did not end in time (launcher.grace_seconds): it is ended", flush=True)
            self._kill(signal.SIGKILL)
            self._asked = now
        for pid, worker in self._workers.items():
            if pid not in self._signalled:
                self._signalled.add(pid)
                with suppress(psutil.Error):
                    worker.process.send_signal(signal.Signals[str(self._run.setting("script.signal"))])

    def _end_a_hang(self, now: float) -> None:
        """Ends the workers when none of the run's has printed or computed anything for too long."""
        if self._aborted is not None:
            if now - self._aborted > _ABORT_SECONDS:
                self._kill(signal.SIGKILL)
            return
        limit = float(self._run.setting("launcher.timeout_seconds") or 0)
        if self._asked is not None or any(now - worker.moved <= limit for worker in self._workers.values()):
            return
        beats = [self._run.beat(rank) for rank in self._run.beating_ranks()]
        if any(time.time() - float(beat.get("moved") or 0.0) <= limit for beat in beats):
            return
        # Imported here, because every script waits for the imports of this module.
        from ortlaunch.run import failure

        self._aborted = now
        for worker in self._workers.values():
            log = self._run.rank_log(worker.rank)
            text = (
                f"no progress for {limit:g} s (launcher.timeout_seconds): the script printed nothing and used no "
                f"processor time; its stacks are at the end of {log}"
            )
            failure.record(self._run.path, worker.rank, TrainingError(text))
        # PYTHONFAULTHANDLER=1 has the interpreter write the stacks of all threads.
        self._kill(signal.SIGABRT)

    def _kill(self, number: int) -> None:
        for worker in self._workers.values():
            with suppress(psutil.Error):
                worker.process.send_signal(number)

    def _show(self) -> None:
        """Shows on the terminal what the first worker has printed since the last call."""
        log = self._run.rank_log(0)
        new = size_of(log) - self._shown
        # A worker that ends at once may never have been seen.
        if new <= 0 or not (0 in self._ranks or (self._done.is_set() and self._node == 0)):
            return
        with suppress(OSError):
            if new > _MOST_SHOWN:
                print(f"ortlaunch: {new - _MOST_SHOWN:,} bytes of output are in {log} alone", flush=True)
                self._shown += new - _MOST_SHOWN
            with log.open("rb") as file:
                file.seek(self._shown)
                text = file.read(_MOST_SHOWN)
            # An unfinished line waits for its rest.
            text = text if self._done.is_set() else text[: text.rfind(b"\n") + 1]
            self._shown += len(text)
            for line in text.decode(errors="replace").removesuffix("\n").split("\n") if text else ():
                # Of a progress bar, which returns to the line's beginning, what it shows last.
                print(line.rstrip("\r").rpartition("\r")[2])
            sys.stdout.flush()


@contextmanager
def watched(run: Run) -> Iterator[None]:
    """Watches the workers that are started within the context."""
    watch = ScriptWatch(run)
    watch.start()
    in_order = False
    try:
        yield
        in_order = True
    finally:
        watch.end(in_order=in_order)
