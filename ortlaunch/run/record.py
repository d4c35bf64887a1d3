"""Reads a summary of a run from its folder: the small files, and the beginning and the end of the journal.

The journal of a long run has many megabytes. Its first lines describe the run and its last lines hold the present
state. Only these parts are read, which are some 150 KB at most.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ortlaunch.base.reading import Damage, notice, noticing, open_plain
from ortlaunch.run.events import Event, Measured, is_count
from ortlaunch.run.folders import RunFolder
from ortlaunch.run.identity import Process
from ortlaunch.run.journal import decoded_lines
from ortlaunch.run.run import Run, job_key
from ortlaunch.run.state import STEPS_KEY, STEPS_TAG, RunState

_HEAD_BYTES = 16 * 1024
_TAIL_BYTES = (8 * 1024, 128 * 1024)
"""The bytes read from the journal's end: the first number, or the second if that part holds no log step."""

_STOP_WITHOUT_WORD = "cancel"
"""What a request to stop without a word counts as. A user may make the STOP file with ``touch``."""


@dataclass
class Record:
    """The summary of one run folder."""

    folder: RunFolder
    state: RunState = field(default_factory=RunState)
    """The state after the events in the parts that were read."""
    steps: int | None = None
    """The number of steps that the run is to make."""
    step: int | None = None
    """The last known step."""
    began: int | None = None
    """When the latest attempt began, in milliseconds; None where the parts that were read do not say."""
    job: dict[str, Any] | None = None
    """The scheduler's job."""
    launcher: Process | None = None
    """The local launcher's process."""
    stop: str | None = None
    """The first word of the request to stop; None where there is no request."""
    stopped_step: int | None = None
    done: bool = False
    checkpoint: str = ""
    """The name of the newest complete checkpoint."""
    beat: float | None = None
    """The time of the first worker's last sign of life, in seconds since the epoch."""
    damage: list[Damage] = field(default_factory=list)
    """The files that could not be read."""

    @property
    def run(self) -> Run:
        """The run itself."""
        return Run(self.folder.path)

    @property
    def name(self) -> str:
        """The run's name."""
        return self.state.name or self.folder.name

    @property
    def experiment(self) -> str:
        """The experiment that the run belongs to."""
        return self.state.experiment or self.folder.experiment

    @property
    def run_id(self) -> str:
        """ortlaunch's short id."""
        return self.state.run_id or self.folder.run_id

    @property
    def ended(self) -> str | None:
        """FINISHED, FAILED or KILLED; None if the journal continues after the last end, or has none."""
        return self.state.ended

    @property
    def tags(self) -> dict[str, str]:
        """The tags in the parts that were read."""
        return self.state.tags

    @property
    def job_id(self) -> str | None:
        """The job's id, as the launcher of its scheduler writes it."""
        return job_key(self.job)

    @property
    def scheduler(self) -> str | None:
        """The name of the launcher whose scheduler has the job; None for a run without a job."""
        return scheduler_of(self.job)


def read_record(folder: RunFolder) -> Record:
    """Reads the summary of a run folder. Files that are missing or broken leave their fields unset."""
    with noticing() as damage:
        record = _read(folder)
    record.damage = damage
    return record


def _read(folder: RunFolder) -> Record:
    run = Run(folder.path)
    record = Record(folder, job=run.job(), launcher=run.launcher(), done=run.is_done())
    if (word := run.stop_word()) is not None:
        record.stop = word or _STOP_WITHOUT_WORD
    if (stopped := run.stopped()) is not None:
        record.stopped_step = stopped.step
    _read_journal(run.journal_file, record.state)
    run.take_kept_end(record.state)
    record.step, record.began = record.state.step, record.state.began
    _take_launch_time(run.launcher_file, record)
    if record.ended != "FINISHED":
        record.checkpoint = run.newest_checkpoint()
    if record.stopped_step is not None and record.ended is not None:
        record.step = record.stopped_step
    if record.ended is None:
        _take_beat(run.beat(), record)
    steps = run.setting(STEPS_KEY)
    # The record of a run in epochs or tokens has no steps until its workers have counted them.
    by_workers = STEPS_TAG in record.state.tags or (record.state.attempts > 0 and record.state.steps is None)
    record.steps = steps if is_count(steps) and not by_workers else record.state.steps
    return record


def scheduler_of(job: dict[str, Any] | None) -> str | None:
    """The name of the launcher whose scheduler has the job; None without a job.

    Args:
        job: the content of job.json.
    """
    return None if job is None else str(job.get("scheduler", "slurm"))


def _take_launch_time(path: Path, record: Record) -> None:
    """Takes the attempt's beginning from the launcher's file: the end of a long journal no longer shows it."""
    if record.launcher is not None and record.job is None:
        try:
            record.began = max(record.began or 0, path.stat().st_mtime_ns // 1_000_000)
        except OSError:
            return


def _take_beat(health: dict[str, Any], record: Record) -> None:
    """Takes the step from the first worker's sign of life, which is newer than the journal between log steps."""
    beat, step = health.get("time"), health.get("step")
    if (
        not isinstance(beat, float)
        or not math.isfinite(beat)
        or (record.began is not None and beat * 1000 < record.began)
    ):
        return
    record.beat = beat
    if is_count(step) and record.step is not None:
        record.step = max(step, record.step)


def _read_journal(path: Path, state: RunState) -> None:
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            for events in _parts(file, size):
                for event in events:
                    state.take(event)
            file.seek(0)
            # A launcher that was killed may have left a part of the first event.
            if size and state.last is None and file.read(1) != b"{":
                notice(path, "it holds no event")
    except FileNotFoundError:
        return
    except OSError as error:
        notice(path, error)


def _parts(file: Any, size: int) -> Iterator[list[Event]]:
    """Yields the events in the journal's beginning, then those in its end. No event comes twice."""
    head = file.read(min(size, _HEAD_BYTES))
    cut = head.rfind(b"\n") + 1
    yield decoded_lines(head[:cut])
    for length in _TAIL_BYTES:
        start = max(cut, size - length)
        file.seek(start)
        tail = file.read(size - start)
        if start > cut:  # The first line is cut off.
            tail = tail[tail.find(b"\n") + 1 :]
        events = decoded_lines(tail[: tail.rfind(b"\n") + 1])
        if start == cut or length == _TAIL_BYTES[-1] or any(_is_step(event) for event in events):
            yield events
            return


def _is_step(event: Event) -> bool:
    return isinstance(event, Measured) and event.is_log_step
