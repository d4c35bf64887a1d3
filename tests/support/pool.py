"""Runs in workers that stay: what a run computes, without the processes' start that is most of a short run's time.

A pool is torchrun with workers that train one run after the other. Its runs have everything that workers and journal
have to do with: the run folder as the launcher writes it, checkpoints, weights, logs, failures. What the launcher does
beside that (watching, stopping, MLflow, exit codes) is tested by whole runs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

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
        self._process: subprocess.Popen[bytes] | None = None
        self._requests = folder
        self._number = 0
        self._started = 0

    def train(self, cwd: Path, *overrides: str) -> Trained:
        """Trains a run to its end.

        Args:
            cwd: the folder that the command is typed in: its run folder lies below, and a user's modules lie there.
            overrides: the command line; the number of workers is the pool's.
        """
        here = Path.cwd()
        os.chdir(cwd)
        try:
            words = [*overrides, "device=cpu", f"launcher.workers_per_node={self._workers}"]
            config = prepared(to_config(compose(words)))
            plan = make_plan(config)
            write_run_folder(plan, config, list(overrides), Start(["torchrun"]))
        finally:
            os.chdir(here)
        assert plan.workers == self._workers
        journal = Journal(plan.journal)
        journal_start(journal, plan, config)
        answers = self._ask(plan.run_dir, cwd)
        failed = [answer for answer in answers if answer]
        journal.end("FAILED" if failed else "FINISHED")
        journal.close()
        first: dict[str, Any] = failed[0] if failed else {"error": "", "is_request": False}
        return Trained(plan.run_dir, first["error"], first["is_request"])

    def close(self) -> None:
        """Ends the workers."""
        if self._process is not None and self._process.poll() is None:
            self._request("")
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._kill()

    def _ask(self, run_dir: Path, cwd: Path) -> list[dict[str, Any]]:
        if self._process is None or self._process.poll() is not None:
            self._start()
        self._request(json.dumps({"run_dir": str(run_dir), "cwd": str(cwd)}))
        paths = [self._requests / f"{self._number}.{rank}.answer" for rank in range(self._workers)]
        deadline = time.monotonic() + SECONDS
        begun: float | None = None
        while not all(path.exists() for path in paths):
            answered = [json.loads(path.read_text()) for path in paths if path.exists()]
            if any(answered):
                begun = begun or time.monotonic()
                # The others wait in a collective that will not come.
                deadline = min(deadline, begun + _PARTING_SECONDS)
            assert self._process is not None
            if time.monotonic() > deadline or self._process.poll() is not None:
                self._kill()
                said = (self._requests / "torchrun.log").read_text(errors="replace")[-2000:]
                return answered or [{"error": f"the workers did not answer:\n{said}", "is_request": False}]
            time.sleep(0.02)
        answers: list[dict[str, Any]] = [json.loads(path.read_text()) for path in paths]
        return answers

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
        environment = os.environ | {
            "PYTHONPATH": str(Path(ortlaunch.__file__).parents[1]),
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // self._workers)),
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": "lo",
            "TOKENIZERS_PARALLELISM": "false",
            "TORCH_WARM_POOL": "0",
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        with open(self._requests / "torchrun.log", "wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={self._workers}", "--nnodes=1"),
                    *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
                    *("-m", "tests.support.pool_worker", str(self._requests)),
                ],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _kill(self) -> None:
        assert self._process is not None
        for process in _below(self._process.pid):
            os.kill(process, signal.SIGKILL)
        self._process.wait()


def _below(pid: int) -> list[int]:
    import psutil

    try:
        root = psutil.Process(pid)
        return [*(child.pid for child in root.children(recursive=True)), pid]
    except psutil.Error:
        return []
