"""The folder of a tuning, found again by what is tuned where: a sweep's folder with the notes beside."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import ortlaunch
from ortlaunch.base.files import replace_text
from ortlaunch.base.locks import exclusive
from ortlaunch.base.reading import read_json
from ortlaunch.base.user import user_cache
from ortlaunch.config.devices import usable_cores, visible_gpus
from ortlaunch.config.load import to_dict
from ortlaunch.config.schema import Config
from ortlaunch.launch.plan import folder_name
from ortlaunch.models.registry import digests
from ortlaunch.run.run import Run
from ortlaunch.run.sweep import Sweep, opened, runs_of
from ortlaunch.tune.cell import Cell
from ortlaunch.tune.render import can_be_shown
from ortlaunch.tune.space import Space
from ortlaunch.verbs.multirun import create_sweep

KEY, NOTES, RESULT, LOCK, JOBS = "tune.json", "notes.jsonl", "result.json", "tune.lock", "jobs"
_PACKAGES = ("torch", "transformers", "deepspeed", "onnxruntime-training", "onnxruntime-training-cpu")
_OF_SPEED = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_", "MALLOC_", "LD_PRELOAD"),
    *("PYTORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_"),
)
"""Beginnings of environment variables that change the speed or the memory of a run."""
_NOT_TUNED = ("experiment", "run_root", "name", "tracking", "trackers", "profile")
_MAKING = "tune.lock"
"""Held in the user's cache while a tuning's folder is looked for and made."""
_MOST_SECONDS = 10.0
_EXACT = 2**28
"""Sizes of memory are compared to a quarter of a GiB: the kernel of another boot keeps some for itself."""


@dataclass
class TuneFolder:
    """One tuning's folder."""

    sweep: Sweep

    @property
    def path(self) -> Path:
        """The folder."""
        return self.sweep.folder

    def open(self) -> None:
        """Says that this process adds runs: without it, the next trial that ends would end the sweep again."""
        sweep, run = self.sweep, Run(self.path)
        sweep.write(runs_of(self.path) or [], complete=False)
        if run.state().ended is not None:
            with run.journal() as journal:
                journal.start(sweep.experiment, sweep.name, sweep.run_id)
        run.note_launcher()

    def next_number(self) -> int:
        """The next number of a run in the sweep."""
        trials = self.path / "trials"
        return max((int(one.name) + 1 for one in trials.glob("[0-9]*") if one.name.isdecimal()), default=0)

    def add(self, run: Path) -> None:
        """Notes a run in the sweep."""
        runs = runs_of(self.path) or []
        if run not in runs:
            self.sweep.write([*runs, run], complete=False)

    def close(self) -> None:
        """Says that no run will be added for now."""
        self.sweep.write(runs_of(self.path) or [], complete=True)

    def result(self) -> dict[str, Any] | None:
        """The result that was written; None if there is none that can be shown.

        Without it the search goes on: it takes what was measured from the notes, and writes the result anew.
        """
        found = read_json(self.path / RESULT)
        return found if found is not None and can_be_shown(found) else None

    def write_result(self, result: dict[str, Any]) -> None:
        """Writes the result."""
        replace_text(self.path / RESULT, json.dumps(result, indent=2) + "\n")


def machine() -> dict[str, Any]:
    """What a speed depends on beside the configuration: the machine, the versions, and variables for libraries."""
    versions = {"ortlaunch": ortlaunch.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "processor": _processor(),
        "cores": usable_cores(),
        "memory": psutil.virtual_memory().total // _EXACT,
        "gpus": visible_gpus(),
        "versions": versions,
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_OF_SPEED)},
    }


def key_of(space: Space, limit: int | None, here: dict[str, Any]) -> str:
    """The digest of what is tuned, where.

    Args:
        space: the configuration and the cells.
        limit: the memory that was asked for; None for what is free.
        here: what `machine` returned.
    """
    settings = {key: value for key, value in to_dict(space.asked).items() if key not in _NOT_TUNED}
    # With a freed batch the same cell accumulates otherwise.
    cells = sorted(f"{cell} accumulation={space.accumulation(cell)}" for cell in space.cells)
    sources = digests(space.asked.model)
    content = json.dumps([settings, sources, str(space.cell), cells, limit, here], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()


def found_or_made(config: Config, key: str, arguments: list[str], cell: Cell) -> TuneFolder:
    """The folder of `find`, else that of `make`. Of two commands at the same moment, one makes it.

    Raises:
        RequestError: the folder cannot be made.
    """
    cache = user_cache()
    # A cache that cannot be written has no lock, and then both may make one.
    with suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
    with exclusive(cache / _MAKING, _MOST_SECONDS):
        return find(config, key) or make(config, key, arguments, cell)


def find(config: Config, key: str) -> TuneFolder | None:
    """The newest folder of the experiment with this key; None if there is none."""
    for file in sorted(_experiment(config).glob(f"multirun-*/{KEY}"), reverse=True):
        content = read_json(file)
        if content is not None and content.get("key") == key and (sweep := opened(file.parent)) is not None:
            return TuneFolder(sweep)
    return None


def make(config: Config, key: str, arguments: list[str], cell: Cell) -> TuneFolder:
    """Makes a folder.

    Args:
        config: the configuration as asked.
        key: the digest.
        arguments: the command line after ``ortlaunch``, for the record.
        cell: the configuration as asked.

    Raises:
        RequestError: the folder cannot be made.
    """
    experiment, stamp = _experiment(config), time.strftime("%Y%m%d-%H%M%S")
    path = experiment / f"multirun-{stamp}"
    number = 1
    while path.exists():
        number += 1
        path = experiment / f"multirun-{stamp}-{number}"
    sweep = create_sweep(path, f"tune-{config.name or config.model.name}", config, arguments)
    replace_text(path / KEY, json.dumps({"key": key, "asked": str(cell)}) + "\n")
    return TuneFolder(sweep)


def _experiment(config: Config) -> Path:
    return (Path(config.run_root) / folder_name(config.experiment)).absolute()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
