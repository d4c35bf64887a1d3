"""Whole runs for the integration tests: the command as users start it, with real torchrun, workers and MLflow."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.cli import dispatch
from ortlaunch.compose.hydra_tree import compose
from tests.support.cli import answer
from tests.support.environment import environment
from tests.support.pool import Pool, Trained
from tests.support.runs import Recorded, journal

RUN_SECONDS = 240
"""Longest wait for one run: some thirty times what it takes on an idle machine."""

Launch = Callable[..., "Result"]


@dataclass(frozen=True)
class Result(Recorded):
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


class Started:
    """A command that runs, in a session of its own as a terminal would give it."""

    def __init__(self, cwd: Path, arguments: tuple[str, ...], prefix: list[str] | None = None) -> None:
        self.cwd = cwd
        self._known = set(cwd.glob("runs/*/*"))
        self.process = subprocess.Popen(
            [*(prefix or []), sys.executable, "-m", "ortlaunch", *arguments],
            cwd=cwd,
            env=environment(),
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

    def __init__(self, folder: Path, table: dict[str, tuple[str, ...]], ahead: int = 1) -> None:
        """`ahead` runs of the table, after the one that is asked for, are begun with it."""
        self.folder = folder
        self._ahead = ahead
        self._table = table
        self._pool = ThreadPoolExecutor(max_workers=2)
        self._futures: dict[str, Future[Result]] = {}

    def __getitem__(self, name: str) -> Result:
        # Start-up is most of a short run and one core wide: the next one in the table comes up meanwhile.
        names = list(self._table)
        for ahead in names[names.index(name) :][: self._ahead + 1]:
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


def mentioning(folder: Path) -> list[psutil.Process]:
    """Processes whose command line names the folder or something in it, zombies aside."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        named = any(str(folder) in word for word in process.info["cmdline"] or [])
        if named and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


_TOGETHER = {
    "test_records.py": "matrix",
    "test_matrix.py": "matrix",
    "test_ort_debug.py": "matrix",
    "test_command.py": "sweep",
    "test_sweep.py": "sweep",
}
"""Files that look at the same runs."""
_LONGEST = ("numbers", "test_resume.py", "matrix", "test_loop.py", "test_export_device.py", "test_check.py")
_LONGEST += ("test_weights.py", "test_stored_runs.py", "test_engines.py", "test_odd_weights.py", "test_precision.py")
"""Groups that a process begins with, so that none is left alone with one of them."""


# Before pytest-xdist writes the groups into the names.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Has each file's tests run in one process (``--dist=loadgroup``), with those of files that share its runs.

    The longest groups come first; ``--no-loadscope-reorder`` keeps that order.
    """
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group(_TOGETHER.get(item.path.name, item.path.name)))
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    """The place of an item's group among the longest."""
    marker = item.get_closest_marker("xdist_group")
    name = marker.args[0] if marker else ""
    return _LONGEST.index(name) if name in _LONGEST else len(_LONGEST)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fails where pytest-xdist has formed no groups: two processes would make the same runs, and jobs of one number."""
    if session.config.option.__dict__.get("loadgroup"):
        for item in session.items:
            grouped = "@" in item.nodeid or item.get_closest_marker("xdist_group") is None
            assert grouped, f"pytest-xdist has put {item.nodeid} in no group"


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


@pytest.fixture
def ask(capfd: pytest.CaptureFixture[str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs ``ortlaunch ARGUMENTS...`` in a folder within this process, for what starts no run: saves the imports."""
    return lambda cwd, *arguments: answer(cwd, capfd, *arguments)


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
def fleet_of() -> Callable[..., Fleet]:
    """Makes the runs of a table in a folder."""
    return Fleet


Train = Callable[..., Trained]


@pytest.fixture(scope="session")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Pool]]:
    """The pool of a number of workers, the same one for all tests of this process."""
    folder = tmp_path_factory.mktemp("pools")
    made: dict[int, Pool] = {}
    yield lambda workers: made.setdefault(workers, Pool(folder, workers))
    for pool in made.values():
        pool.close()


@pytest.fixture(scope="session")
def train(pools: Callable[[int], Pool]) -> Train:
    """Trains ``ARGUMENTS...`` in a folder with workers that stay; `workers` is their number (default: 2, or 1)."""

    def run(cwd: Path, *arguments: str, workers: int | None = None, record: Path | None = None) -> Trained:
        if workers is None:
            workers = 1 if compose(list(arguments)).trainer.name == "single" else 2
        return pools(workers).train(cwd, *arguments, record=record)

    return run


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What ``ortlaunch ARGUMENTS...`` answers in an empty folder, which is exit code 2; it leaves nothing there."""

    def ask(*arguments: str) -> str:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(RequestError) as raised:
            dispatch(list(arguments))
        assert list(tmp_path.iterdir()) == []
        return str(raised.value)

    return ask


class Table:
    """The runs of a table, each trained once however many tests look at it, by workers that stay."""

    def __init__(self, folder: Path, table: dict[str, tuple[str, ...]], train: Train) -> None:
        self.folder = folder
        self._table = table
        self._train = train
        self._made: dict[str, Trained] = {}

    def __getitem__(self, name: str) -> Trained:
        if name not in self._made:
            self._made[name] = self._train(self.folder, *self._table[name])
        return self._made[name]


@pytest.fixture(scope="session")
def table_of(train: Train) -> Callable[[Path, dict[str, tuple[str, ...]]], Table]:
    """Trains the runs of a table in a folder."""
    return lambda folder, table: Table(folder, table, train)


# No dropout, so that runs differ by nothing but what computes them; four samples a step whoever shares them.
_GPT = (
    "model=gpt2_nano",
    "model.params.n_layer=2",
    *(f"model.params.{kind}_pdrop=0" for kind in ("resid", "embd", "attn")),
)
_FEW = ("data.seq_len=64", "train.steps=20", "train.log_every=1", "train.batch_size=2")
_SAME = (*_GPT, *_FEW)


MATRIX: dict[str, tuple[str, ...]] = {
    "eager-ddp": ("backend=eager", "trainer=ddp", *_SAME),
    "eager-zero1": ("backend=eager", "trainer=deepspeed", "trainer.zero_stage=1", *_SAME),
    "ort-ddp": ("backend=ort", "trainer=ddp", *_SAME),
}


WHOLE = ("ort-ddp", "eager-zero1")
"""Of these whole runs are made, too."""


@pytest.fixture(scope="session")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Whole runs of some of `MATRIX` by name: 2 workers, the same model, data and seed."""
    fleet = Fleet(tmp_path_factory.mktemp("matrix"), {name: MATRIX[name] for name in WHOLE})
    yield fleet
    fleet.close()


@pytest.fixture(scope="session")
def computed(table_of: Callable[..., Table], tmp_path_factory: pytest.TempPathFactory) -> Table:
    """All of `MATRIX`, by workers that stay."""
    table = {name: (*words, "tracking=none") for name, words in MATRIX.items()}
    return table_of(tmp_path_factory.mktemp("computed"), table)


@pytest.fixture(scope="session")
def sweep(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A sweep of two runs."""
    words = ("--multirun", "backend=eager,ort", "model=mlp", "train.steps=20", "train.log_every=5")
    return launch(tmp_path_factory.mktemp("sweep"), *words)


TALKS = """
import os
from torch import nn

class Talks(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(64, 32), nn.Linear(32, 10)
        print("hello from", os.environ["RANK"])

    def forward(self, pixel_values):
        return self.out(self.hidden(pixel_values.flatten(1)).relu())
"""


HIDES_NOTHING = ("torch", "onnx", "transformers")
"""Files in the folder of `debugged` that have the names of libraries. This package's own command imports none."""


@pytest.fixture(scope="session")
def debugged(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run of a model that prints, with every debug option of ORT set, in a folder and an experiment of any name."""
    folder = tmp_path_factory.mktemp("läufe") / "über alles, 'mit' Leerzeichen & Zeichen"
    folder.mkdir()
    (folder / "netze.py").write_text(TALKS)
    for name in HIDES_NOTHING:
        (folder / f"{name}.py").write_text("raise SystemExit('in the place of a library')")
    words = ("model=factory", "model.target=netze:Talks", "data=digits", "experiment='größere Läufe'")
    options = ("save_onnx=true", "log_level=verbose", "onnx_prefix=net")
    return launch(folder, *words, "train.steps=2", *(f"backend.debug.{option}" for option in options))
