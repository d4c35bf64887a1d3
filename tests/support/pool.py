"""Runs in workers that stay: what a run computes, without the processes' start that is most of a short run's time.

A pool's workers train one run after the other, in the environment that torchrun gives. Its runs have everything that
workers and journal have to do with: the run folder as the launcher writes it, checkpoints, weights, logs, failures.
What torchrun and the launcher do beside that (watching, stopping, MLflow, exit codes) is tested by whole runs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist

import ortlaunch
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.compose.prepare import prepared
from ortlaunch.config.load import to_config
from ortlaunch.launch.folder import journal_start, write_run_folder
from ortlaunch.launch.plan import Start
from ortlaunch.launch.planning import make_plan
from ortlaunch.run.journal import Journal
from tests.support.runs import Recorded

SECONDS = 240
"""Longest wait for one run; a pool's first run waits for the pool as well."""
RUNS = 48
"""Runs of the same processes, so that what each leaves in memory does not add up without end."""

_PARTING_SECONDS = 30
"""Longest wait for the others after a worker has failed."""


@dataclass(frozen=True)
class Trained(Recorded):
    """A run of a pool."""

    folder: Path
    error: str
    """What the first worker that failed said; empty for a run that finished."""
    is_request: bool
    """The request was found wrong."""

    @property
    def run_dir(self) -> Path:
        return self.folder

    @property
    def report(self) -> str:
        """Everything to look at when an assertion about this run fails."""
        # Workers that died before the run began leave no log.
        log = self.run_dir / "logs" / "rank-0.log"
        return f"{self.error}\n{log.read_text()[-4000:] if log.exists() else 'no log of rank 0'}"

    @cached_property
    def stdout(self) -> str:
        """What the first worker has printed."""
        return self.log(0)


class Pool:
    """A number of workers; started with the first run, and again after one that broke it."""

    def __init__(self, folder: Path, workers: int) -> None:
        self._folder = folder
        self._workers = workers
        self._processes: list[subprocess.Popen[bytes]] = []
        self._store: dist.TCPStore | None = None
        self._requests = folder
        self._number = 0
        self._started = 0
        self._has_failed = False

    def train(self, cwd: Path, *overrides: str, record: Path | None = None) -> Trained:
        """Trains a run to its end.

        Args:
            cwd: the folder that the command is typed in: its run folder lies below, and a user's modules lie there.
            overrides: the command line; the number of workers is the pool's.
            record: an existing folder for what `tests.support.recording` keeps; None keeps nothing.
        """
        here = Path.cwd()
        os.chdir(cwd)
        try:
            words = [*overrides, "device=cpu", f"launcher.workers_per_node={self._workers}"]
            config = prepared(to_config(compose(words)))
            plan = make_plan(config, arguments=overrides)
            write_run_folder(plan, Start(["torchrun"]))
        finally:
            os.chdir(here)
        assert plan.workers == self._workers
        journal = Journal(plan.journal)
        journal_start(journal, plan)
        failed = self._failures(plan.run_dir, cwd, record)
        self._has_failed = bool(failed)
        journal.end("FAILED" if failed else "FINISHED")
        journal.close()
        first: dict[str, Any] = failed[0] if failed else {"error": "", "is_request": False}
        return Trained(plan.run_dir, first["error"], first["is_request"])

    def close(self) -> None:
        """Ends the workers."""
        if self._are_there():
            self._request("")
            for process in self._processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=10)
        self._kill()

    def _failures(self, run_dir: Path, cwd: Path, record: Path | None) -> list[dict[str, Any]]:
        """Has the workers train; returns what those that failed answer."""
        for _ in range(2):
            try:
                return [answer for answer in self._ask(run_dir, cwd, record) if answer]
            except _GoneError as error:
                said = str(error)
                if (run_dir / "logs").exists():
                    break
                # What an earlier run left behind ended them; this run has not begun.
                warnings.warn(f"a pool's workers ended between two runs: {said}", stacklevel=3)
        return [{"error": said, "is_request": False}]

    def _ask(self, run_dir: Path, cwd: Path, record: Path | None) -> list[dict[str, Any]]:
        if self._number >= RUNS:
            self.close()
        if not self._are_there():
            self._kill()
            self._start()
        kept = str(record) if record else ""
        request = {"run_dir": str(run_dir), "cwd": str(cwd), "record": kept, "after_failure": self._has_failed}
        self._request(json.dumps(request))
        paths = [self._requests / f"{self._number}.{rank}.answer" for rank in range(self._workers)]
        deadline = time.monotonic() + SECONDS
        begun: float | None = None
        while not all(path.exists() for path in paths):
            answered = [json.loads(path.read_text()) for path in paths if path.exists()]
            if any(answered):
                begun = begun or time.monotonic()
                # The others wait in a collective that will not come.
                deadline = min(deadline, begun + _PARTING_SECONDS)
            if time.monotonic() > deadline or not self._are_there():
                codes = [process.poll() for process in self._processes]
                self._kill()
                if any(answered):
                    return answered
                said = (self._requests / "output.log").read_text(errors="replace")[-2000:]
                raise _GoneError(f"the workers did not answer (exit codes {codes}):\n{said}")
            time.sleep(0.02)
        answers: list[dict[str, Any]] = [json.loads(path.read_text()) for path in paths]
        return answers

    def _are_there(self) -> bool:
        return bool(self._processes) and all(process.poll() is None for process in self._processes)

    def _request(self, text: str) -> None:
        self._number += 1
        path = self._requests / f"{self._number}.request"
        temporary = path.with_suffix(".new")
        temporary.write_text(text)
        temporary.rename(path)

    def _start(self) -> None:
        self._started += 1
        self._number = 0
        self._requests = self._folder / f"pool-{self._workers}-{self._started}"
        self._requests.mkdir(parents=True)
        # In this process, as torchrun's agent has it: no worker has to find a free port.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = os.environ | {
            "PYTHONPATH": str(Path(ortlaunch.__file__).parents[1]),
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // self._workers)),
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": "lo",
            "TOKENIZERS_PARALLELISM": "false",
            "TORCH_WARM_POOL": "0",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "WORLD_SIZE": str(self._workers),
            "LOCAL_WORLD_SIZE": str(self._workers),
            "GROUP_RANK": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": self._requests.name,
        }
        with open(self._requests / "output.log", "wb") as log:
            self._processes = [
                subprocess.Popen(
                    [sys.executable, "-m", "tests.support.pool_worker", str(self._requests)],
                    env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                for rank in range(self._workers)
            ]

    def _kill(self) -> None:
        for process in self._processes:
            for pid in _below(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        self._processes = []
        self._store = None


class _GoneError(Exception):
    """The workers ended, or did not answer in time."""


def _below(pid: int) -> list[int]:
    import psutil

    try:
        root = psutil.Process(pid)
        return [*(child.pid for child in root.children(recursive=True)), pid]
    except psutil.Error:
        return []
