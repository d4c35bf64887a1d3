"""The folder of a tuning, named by what is tuned where: a sweep's folder, with each outcome as a line of JSON.

The search is a function of these outcomes. After a kill, the same command reads them and asks for the same trials in
the same order, so that it goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from ortlaunch.base.errors import RequestError
from ortlaunch.base.files import replace_text
from ortlaunch.base.free_memory import available
from ortlaunch.base.reading import in_words, parse_json, read_json, read_text
from ortlaunch.config.load import to_dict
from ortlaunch.config.schema import Config
from ortlaunch.launch.kind import kind_of
from ortlaunch.launch.plan import folder_name
from ortlaunch.launch.planning import default_name
from ortlaunch.launch.trial import Limits, Outcome, run_of, short, tried
from ortlaunch.run.making import make_run_folder
from ortlaunch.run.run import Run
from ortlaunch.run.sweep import SweepTask, opened, runs_of
from ortlaunch.tune.search import Effort
from ortlaunch.tune.space import CHECKPOINTING, MICRO, ON, WORKERS, Cell, Space
from ortlaunch.verbs.multirun import create_sweep

NOTES, RESULT, LOCK = "notes.jsonl", "result.json", "tune.lock"
_FORMAT = 2
"""Of notes and results. Those of another one belong to another folder."""
OF_SPEED = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_", "MALLOC_", "LD_PRELOAD"),
    *("PYTORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_"),
)
"""Beginnings of environment variables that change the speed or the memory of a run."""
_NOT_TUNED = ("experiment", "run_root", "name", "tracking", "trackers", "profile")
_EXACT = 2**28
"""Sizes of memory are compared to a quarter of a GiB: the kernel of another boot keeps some for itself."""
_SPARE = 0.9
"""Share of the free memory that a trial may take, so that other processes can go on."""
_AGAIN = 2.0
"""A trial that did not end in its time is made again when it may take this many times as long."""
_LEAST_STEPS, _MOST_STEPS = 6, 20_000
"""Steps that count for the speed. Six are few; a model of seconds a step has no time for more."""
_WINDOWS = 12


class TuneFolder:
    """One tuning's folder and its trials."""

    def __init__(self, space: Space, memory: int | None) -> None:
        """
        Args:
            space: the cells.
            memory: bytes that a trial may take; None for most of what is free when the tuning begins.
        """
        self._space = space
        self._memory = memory
        name = f"multirun-tune-{fingerprint(space, memory)[:12]}"
        self.path = (Path(space.asked.run_root) / folder_name(space.asked.experiment) / name).absolute()
        """The folder, which need not be there."""
        self.notes: dict[str, dict[str, Any]] = {}
        """What was found, by what was asked."""
        self._is_torn = False

    def result(self) -> dict[str, Any] | None:
        """The result that was written; None if there is none."""
        return read_json(self.path / RESULT)

    def write_result(self, result: dict[str, Any]) -> None:
        """Writes the result."""
        replace_text(self.path / RESULT, json.dumps(result, indent=2) + "\n")

    def make(self) -> None:
        """Makes the folder, so that it can be locked.

        Raises:
            RequestError: it cannot be made.
        """
        make_run_folder(self.path)

    def open(self, arguments: list[str], *, anew: bool) -> None:
        """Opens the sweep for further runs, and reads the notes.

        Args:
            arguments: the command line after ``ortlaunch``, for the record.
            anew: whether to forget what was found before.

        Raises:
            RequestError: there are notes that cannot be read.
        """
        config, run = self._space.asked, Run(self.path)
        for file in (NOTES, RESULT) if anew else ():
            (self.path / file).unlink(missing_ok=True)
        self._read_notes()
        sweep = opened(self.path) or create_sweep(
            self.path, f"tune-{config.name or config.model.name}", config, arguments
        )
        # Without this, the next trial that ends would end the sweep again.
        sweep.write([] if anew else runs_of(self.path) or [], complete=False)
        if run.state().ended is not None:
            with run.journal() as journal:
                journal.start(sweep.experiment, sweep.name, sweep.run_id)
        run.note_launcher()
        self._sweep = sweep

    def close(self) -> None:
        """Says that no run will be added for now."""
        self._sweep.write(runs_of(self.path) or [], complete=True)

    @property
    def limit(self) -> int:
        """Bytes that a trial may take, the same after an interruption."""
        if self._memory is not None:
            return self._memory
        if "limit" not in self.notes:
            self._note("limit", {"bytes": int(_SPARE * available())})
        return int(self.notes["limit"]["bytes"])

    def trial(self, cell: Cell, effort: Effort) -> Outcome:
        """Runs one trial to its end, or takes its outcome from the notes.

        A failure of the machine is not noted, nor is a trial that did not end in time while other processes had most of
        the cores: when the search goes on, they are tried again. Another one that did not end in time is made again
        where it may now take several times as long, as with more minutes.
        """
        key = f"{effort.stage} {effort.number} {cell}"
        noted = self.notes.get(key)
        if noted is not None and not (noted["status"] == "time-out" and effort.timeout >= _AGAIN * noted["seconds"]):
            return Outcome(**noted, is_noted=True)
        outcome = self.made(cell, effort)
        if not outcome.is_of_machine and not outcome.is_late_by_others:
            self._note(key, outcome.to_json())
        return outcome

    def made(self, cell: Cell, effort: Effort) -> Outcome:
        """Runs one trial to its end."""
        trials = self.path / "trials"
        number = max((int(one.name) + 1 for one in trials.glob("[0-9]*") if one.name.isdecimal()), default=0)
        folder = trials / str(number)
        outcome = tried(
            self.trained(cell, effort),
            Limits(effort.timeout, self.limit),
            folder,
            seconds=effort.seconds,
            sweep=SweepTask(self.path, number),
            words=self._space.overrides(cell),
        )
        run = run_of(folder)
        if run is not None and run.is_dir():
            self._sweep.write([*(runs_of(self.path) or []), run], complete=False)
        return outcome

    def trained(self, cell: Cell, effort: Effort) -> Config:
        """The configuration of a trial."""
        config = self._space.configured(cell)
        steps = _LEAST_STEPS
        if effort.rate and effort.seconds:
            wanted = math.ceil(effort.seconds * effort.rate / self._space.global_batch(cell))
            steps = min(_MOST_STEPS, max(_LEAST_STEPS, wanted))
        checkpointed = "-checkpointing" if cell[CHECKPOINTING] == ON else ""
        name = f"{default_name(config)}-w{cell[WORKERS]}-b{cell[MICRO]}{checkpointed}"
        return replace(short(config, steps, log_every=max(1, steps // _WINDOWS)), name=name)

    def _read_notes(self) -> None:
        path = self.path / NOTES
        try:
            text = read_text(path)
        except FileNotFoundError:
            text = ""
        except OSError as error:
            raise RequestError(f"{path} cannot be read: {in_words(error)}: move it away") from error
        self.notes = {}
        for line in text.splitlines():
            # A kill may have cut the last one off.
            with suppress(ValueError, KeyError, TypeError):
                stored = parse_json(line)
                self.notes[stored["key"]] = dict(stored["value"])
        self._is_torn = bool(text) and not text.endswith("\n")

    def _note(self, key: str, value: dict[str, Any]) -> None:
        """Notes a value, on the disk when this returns."""
        self.notes[key] = value
        line = json.dumps({"key": key, "value": value}) + "\n"
        with (self.path / NOTES).open("a") as file:
            file.write(f"\n{line}" if self._is_torn else line)
            file.flush()
            os.fsync(file.fileno())
        self._is_torn = False


def fingerprint(space: Space, memory: int | None) -> str:
    """The digest of what is tuned, where, and by whom.

    Args:
        space: the configuration and the cells.
        memory: the memory of a trial that was asked for; None for what is free.
    """
    settings = {key: value for key, value in to_dict(space.asked).items() if key not in _NOT_TUNED}
    cells = [space.overrides(space.cell), *sorted(space.overrides(cell) for cell in space.cells)]
    variables = {name: value for name, value in os.environ.items() if name.startswith(OF_SPEED)}
    here = [os.getuid(), psutil.virtual_memory().total // _EXACT, variables]
    content = json.dumps([_FORMAT, settings, kind_of(space.asked), cells, memory, here], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()
