"""Whole runs for the integration tests: the command as users start it, with real torchrun, workers and MLflow."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import pytest

import ortlaunch

RUN_SECONDS = 240
"""Longest wait for one run: some thirty times what it takes on an idle machine."""

Launch = Callable[..., "Result"]

_FOREIGN = ("MLFLOW_TRACKING_URI", "HYDRA_FULL_ERROR", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True)
class Result:
    """A command that has ended, and what its run left behind."""

    returncode: int
    stdout: str
    stderr: str
    cwd: Path

    @property
    def report(self) -> str:
        """Everything to look at when an assertion about this run fails."""
        return f"exit code {self.returncode}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"

    @property
    def run_dirs(self) -> list[Path]:
        """The run folders in the order in which the command named them, each once."""
        return list(dict.fromkeys(map(Path, re.findall(r"^run folder: (.*)$", self.stdout, re.MULTILINE))))

    @property
    def run_dir(self) -> Path:
        """The run folder of a command that made one run."""
        (only,) = self.run_dirs
        return only

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """The journal."""
        return journal(self.run_dir)

    def series(self, name: str) -> dict[int, float]:
        """A metric's values by step."""
        return {step: values[name] for step, values in self._metrics() if name in values}

    @property
    def losses(self) -> dict[int, float]:
        """train/loss by step."""
        return self.series("train/loss")

    @property
    def tags(self) -> dict[str, str]:
        """The journal's tags, the latest value of each."""
        return {
            key: value for event in self.events if event["event"] == "tags" for key, value in event["values"].items()
        }

    @property
    def points(self) -> set[tuple[str, int, float]]:
        """All metric values of the journal as (name, step, value)."""
        return {(name, step, value) for step, values in self._metrics() for name, value in values.items()}

    @property
    def status(self) -> str:
        """How the journal says that the run ended."""
        return next((event["status"] for event in reversed(self.events) if event["event"] == "end"), "unfinished")

    def log(self, rank: int) -> str:
        """A worker's log file."""
        return (self.run_dir / "logs" / f"rank-{rank}.log").read_text()

    def _metrics(self) -> Iterator[tuple[int, dict[str, float]]]:
        for event in self.events:
            if event["event"] == "metrics":
                yield event["step"], event["values"]


class Started:
    """A command that runs, in a session of its own as a terminal would give it."""

    def __init__(self, cwd: Path, arguments: tuple[str, ...], prefix: list[str] | None = None) -> None:
        self.cwd = cwd
        self._known = set(cwd.glob("runs/*/*"))
        self.process = subprocess.Popen(
            [*(prefix or []), sys.executable, "-m", "ortlaunch", *arguments],
            cwd=cwd,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_for_training(self) -> Path:
        """Waits for the first loss in the journal; returns the run folder."""
        deadline = time.monotonic() + RUN_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            for run_dir in set(self.cwd.glob("runs/*/*")) - self._known:
                if any("train/loss" in event.get("values", {}) for event in journal(run_dir)):
                    return run_dir
            time.sleep(0.1)
        pytest.fail(f"no step was trained: {self.finish(1).report}")

    def finish(self, seconds: float = RUN_SECONDS) -> Result:
        """Waits for the command's end; one that does not end in time is ended and fails the test."""
        try:
            stdout, stderr = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.end()
            stdout, stderr = self.process.communicate()
            pytest.fail(f"not ended after {seconds} s\n{stdout}\n{stderr}")
        return Result(self.process.returncode, stdout, stderr, self.cwd)

    def end(self) -> None:
        """Ends whatever of it is still there."""
        if self.process.poll() is None:
            self.process.kill()
        for process in mentioning(self.cwd):
            with suppress(psutil.Error):
                process.kill()


class Fleet:
    """The runs of a table, each made once however many tests look at it, all in one folder and one MLflow store."""

    def __init__(self, folder: Path, table: dict[str, tuple[str, ...]]) -> None:
        self.folder = folder
        self._table = table
        self._pool = ThreadPoolExecutor(max_workers=2)
        self._futures: dict[str, Future[Result]] = {}

    def __getitem__(self, name: str) -> Result:
        # Start-up is most of a short run and one core wide: the next one in the table comes up meanwhile.
        names = list(self._table)
        for ahead in names[names.index(name) :][:2]:
            if ahead not in self._futures:
                self._futures[ahead] = self._pool.submit(self._run, *self._table[ahead])
        return self._futures[name].result()

    def command(self, name: str) -> tuple[str, ...]:
        """What a run of the table was started with."""
        return self._table[name]

    def close(self) -> None:
        """Waits for what has begun."""
        self._pool.shutdown(cancel_futures=True)

    def _run(self, *overrides: str) -> Result:
        return Started(self.folder, overrides).finish()


def journal(run_dir: Path) -> list[dict[str, Any]]:
    """The complete lines of a run's journal."""
    path = run_dir / "journal.jsonl"
    text = path.read_text() if path.is_file() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def mentioning(folder: Path) -> list[psutil.Process]:
    """Processes whose command line names the folder or something in it, zombies aside."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        named = any(str(folder) in word for word in process.info["cmdline"] or [])
        if named and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def _environment() -> dict[str, str]:
    """The environment without what would change a run, and with the very ortlaunch that the tests import."""
    environment = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    paths = [str(Path(ortlaunch.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUTF8": "1"}


@pytest.fixture(scope="session")
def start() -> Iterator[Callable[..., Started]]:
    """Starts ``ortlaunch ARGUMENTS...`` in a folder and returns at once; `prefix` is put before the command."""
    begun: list[Started] = []

    def begin(cwd: Path, *arguments: str, prefix: list[str] | None = None) -> Started:
        begun.append(Started(cwd, arguments, prefix))
        return begun[-1]

    yield begin
    for one in begun:
        one.end()


@pytest.fixture(scope="session")
def launch(start: Callable[..., Started]) -> Launch:
    """Runs ``ortlaunch ARGUMENTS...`` in a folder to its end."""
    return lambda cwd, *arguments: start(cwd, *arguments).finish()


@pytest.fixture(scope="session")
def leftovers() -> Callable[[Path], list[str]]:
    """Command lines of processes that name a run folder."""

    def look(run_dir: Path) -> list[str]:
        return [" ".join(process.info["cmdline"]) for process in mentioning(run_dir)]

    return look


@pytest.fixture(scope="session")
def mlflow_run() -> Callable[[Result], Any]:
    """Finds the one MLflow run of a result in the store of its folder; returns (client, run)."""
    from mlflow import MlflowClient

    def find(result: Result) -> tuple[Any, Any]:
        client = MlflowClient(f"sqlite:///{result.cwd}/mlruns.db")
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        runs = client.search_runs(experiments)
        (run,) = [run for run in runs if run.data.tags.get("ortlaunch.run_dir") == str(result.run_dir)]
        return client, run

    return find


@pytest.fixture(scope="session")
def fleet_of() -> Callable[[Path, dict[str, tuple[str, ...]]], Fleet]:
    """Makes the runs of a table in a folder."""
    return Fleet


# No dropout, so that runs differ by nothing but what computes them; four samples a step whoever shares them.
_GPT = (
    "model=gpt2_nano",
    "model.params.n_layer=2",
    *(f"model.params.{kind}_pdrop=0" for kind in ("resid", "embd", "attn")),
)
_FEW = ("data.seq_len=64", "train.steps=20", "train.log_every=1", "train.batch_size=2")
_SAME = (*_GPT, *_FEW)
_ACCUMULATED = (*_SAME, "train.batch_size=1", "train.grad_accumulation=2")


def _deepspeed(stage: int) -> tuple[str, ...]:
    return "trainer=deepspeed", f"trainer.zero_stage={stage}"


MATRIX: dict[str, tuple[str, ...]] = {
    "eager-single": ("backend=eager", "trainer=single", *_SAME, "train.batch_size=4"),
    "eager-ddp": ("backend=eager", "trainer=ddp", *_SAME),
    "eager-zero1": ("backend=eager", *_deepspeed(1), *_SAME),
    "eager-zero2": ("backend=eager", *_deepspeed(2), *_SAME),
    "eager-zero3": ("backend=eager", *_deepspeed(3), *_SAME),
    "ort-ddp": ("backend=ort", "trainer=ddp", *_SAME),
    "ort-zero1": ("backend=ort", *_deepspeed(1), *_SAME),
    "ort-zero2": ("backend=ort", *_deepspeed(2), *_SAME),
    "ort-ddp-accumulated": ("backend=ort", "trainer=ddp", *_ACCUMULATED),
    "ort-zero2-accumulated": ("backend=ort", *_deepspeed(2), *_ACCUMULATED),
}


@pytest.fixture(scope="session")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The runs of `MATRIX` by name: 2 workers, the same model, data and seed."""
    fleet = Fleet(tmp_path_factory.mktemp("matrix"), MATRIX)
    yield fleet
    fleet.close()
