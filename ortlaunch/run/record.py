"""What a run folder says of its run: its small files, and the beginning and the end of its journal.

The journal of a long run has many megabytes. Its first lines say what the run is and its last ones where it stands, so
no more than some dozens of kilobytes of it are read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ortlaunch.run.folders import RunFolder
from ortlaunch.run.journal import Event, decoded
from ortlaunch.run.layout import DONE_FILE, HEALTH, STOPPED_FILE, stop_word

_HEAD_BYTES = 16 * 1024
_TAIL_BYTES = (8 * 1024, 128 * 1024)
"""Read from the end: this much, and where it holds no step that much."""

STEPS_KEY = "train.steps"
STATE_TAG = "ortlaunch.state"
REASON_TAG = "ortlaunch.requeue_reason"
_RATES = ("throughput/tokens_per_second", "throughput/samples_per_second")
_MEDIANS = ("summary/tokens_per_second_median", "summary/samples_per_second_median")


@dataclass
class Record:
    """What one run folder says."""

    folder: RunFolder
    name: str
    experiment: str
    run_id: str
    steps: int | None = None
    """Steps that the run is to make."""
    step: int | None = None
    """The last step journalled."""
    loss: float | None = None
    tokens_per_second: float | None = None
    samples_per_second: float | None = None
    tokens_per_second_median: float | None = None
    """Of the steady steps, where the run has come to its end and said so."""
    samples_per_second_median: float | None = None
    step_seconds: float | None = None
    nodes: int = 1
    began: int | None = None
    """When the latest attempt began, in milliseconds; None where the parts read do not say."""
    last: int | None = None
    """Time of the last event in milliseconds."""
    ended: str | None = None
    """FINISHED, FAILED or KILLED, where that is the journal's last word."""
    failure: str = ""
    """The first failure since the latest attempt began, in one line."""
    tags: dict[str, str] = field(default_factory=dict)
    """Those in the parts read."""
    job: dict[str, Any] | None = None
    """job.json: the scheduler's job."""
    launcher: dict[str, Any] | None = None
    """launcher.json: the local launcher's process."""
    stop: str | None = None
    """Why the run is asked to stop; None where it is not."""
    stopped_step: int | None = None
    done: bool = False
    checkpoint: str = ""
    """Name of the newest complete checkpoint."""
    beat: float | None = None
    """When the first worker last said that it lives, in seconds since the epoch."""

    @property
    def job_id(self) -> str | None:
        """The job's id as its scheduler's launcher has it."""
        return job_key(self.job)

    @property
    def scheduler(self) -> str | None:
        """Name of the launcher whose scheduler has the job; None for a run that is no job."""
        return scheduler_of(self.job)


def read_record(folder: RunFolder) -> Record:
    """Reads what a run folder says; what is missing or broken in it stays unknown."""
    path = folder.path
    record = Record(folder, folder.name, folder.experiment, folder.run_id)
    record.job = read_json(path / "job.json")
    record.launcher = read_json(path / "launcher.json")
    word = stop_word(path)
    record.stop = "cancel" if word == "" else word
    stopped = read_json(path / STOPPED_FILE) or {}
    record.stopped_step = stopped.get("step") if isinstance(stopped.get("step"), int) else None
    record.done = (path / DONE_FILE).exists()
    _read_journal(path / "journal.jsonl", record)
    _take_launch_time(path / "launcher.json", record)
    if record.ended != "FINISHED":
        record.checkpoint = newest_checkpoint(path)
    if record.stopped_step is not None and record.ended is not None:
        record.step = record.stopped_step
    if record.ended is None:
        _take_beat(path / HEALTH / "rank-0.json", record)
    steps = _configured_steps(path / "config.yaml")
    record.steps = steps if steps is not None else record.steps
    return record


def read_json(path: Path | str) -> dict[str, Any] | None:
    """A JSON object from a file; None where there is none."""
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def job_key(job: dict[str, Any] | None) -> str | None:
    """The id of the job that a job.json names: ``120``, or ``120_3`` for an array's task; None where it names none."""
    if job is None:
        return None
    array, task = job.get("array_job_id"), job.get("array_task_id")
    if array is not None and task is not None:
        return f"{array}_{task}"
    return None if job.get("job_id") is None else str(job["job_id"])


def scheduler_of(job: dict[str, Any] | None) -> str | None:
    """Name of the launcher whose scheduler has the job of a job.json; None where there is none."""
    return None if job is None else str(job.get("scheduler", "slurm"))


def newest_checkpoint(run_dir: Path) -> str:
    """Name of the newest complete checkpoint in a run folder; empty where there is none."""
    try:
        names = [entry.name for entry in os.scandir(run_dir / "checkpoints") if re.fullmatch(r"step-\d+", entry.name)]
    except OSError:
        return ""
    for name in sorted(names, key=lambda name: int(name[5:]), reverse=True):
        if (run_dir / "checkpoints" / name / "manifest.json").is_file():
            return name
    return ""


def _configured_steps(path: Path) -> int | None:
    """`train.steps` of a config.yaml, without parsing all of it: the command that lists runs reads many."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    match = re.search(r"^train:\n(?:  .*\n)*?  steps: (\d+)$", text, re.MULTILINE)
    return int(match[1]) if match else None


def _take_launch_time(path: Path, record: Record) -> None:
    """A local launcher writes its file when an attempt begins, which a long journal's end no longer shows."""
    if record.launcher is not None and record.job is None:
        try:
            record.began = max(record.began or 0, path.stat().st_mtime_ns // 1_000_000)
        except OSError:
            return


def _take_beat(path: Path, record: Record) -> None:
    """Between two log steps the first worker's sign of life knows the step better than the journal."""
    health = read_json(path) or {}
    beat, step = health.get("time"), health.get("step")
    if not isinstance(beat, float) or (record.began is not None and beat * 1000 < record.began):
        return
    record.beat = beat
    if isinstance(step, int) and record.step is not None:
        record.step = max(step, record.step)


def _read_journal(path: Path, record: Record) -> None:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            for events in _parts(file, size):
                for event in events:
                    _take(event, record)
    except OSError:
        return


def _parts(file: Any, size: int) -> Iterator[list[Event]]:
    """The journal's beginning and its end, none of it twice."""
    head = file.read(min(size, _HEAD_BYTES))
    cut = head.rfind(b"\n") + 1
    yield _events(head[:cut])
    for length in _TAIL_BYTES:
        start = max(cut, size - length)
        file.seek(start)
        tail = file.read(size - start)
        if start > cut:  # The first line is cut off.
            tail = tail[tail.find(b"\n") + 1 :]
        events = _events(tail[: tail.rfind(b"\n") + 1])
        if start == cut or length == _TAIL_BYTES[-1] or any(_is_step(event) for event in events):
            yield events
            return


def _events(data: bytes) -> list[Event]:
    return [event for line in data.split(b"\n") if line.strip() and (event := decoded(line)) is not None]


def _is_step(event: Event) -> bool:
    return event["event"] == "metrics" and "train/loss" in event["values"]


def _take(event: Event, record: Record) -> None:
    kind, record.last = event["event"], event["t"]
    if kind == "start":
        record.name, record.experiment, record.run_id = event["name"], event["experiment"], event["run_id"]
        record.ended, record.failure = None, ""
        # A job only waits from here on.
        record.began = event["t"] if record.job is None else None
    elif kind == "params":
        steps = event["values"].get(STEPS_KEY, "")
        record.steps = int(steps) if steps.isdecimal() else record.steps
        nodes = event["values"].get("launcher.nodes", "")
        record.nodes = int(nodes) if nodes.isdecimal() else record.nodes
    elif kind == "tags":
        record.tags |= event["values"]
        if event["values"].get(STATE_TAG) == "running":
            record.began = event["t"]
    elif kind == "metrics":
        _take_step(event, record)
    elif kind == "rewind":
        record.step = event["step"]
    elif kind == "requeue":
        record.tags[REASON_TAG] = event["reason"]
    elif kind == "failure":
        said = [line.strip() for line in event["message"].splitlines() if line.strip()]
        record.failure = record.failure or f"rank {event['rank']} on {event['host']}: {said[-1] if said else ''}"
    elif kind == "end":
        record.ended = event["status"]


def _take_step(event: Event, record: Record) -> None:
    values = event["values"]
    if _is_step(event) or values.keys() & set(_MEDIANS):
        # A log step after a summary is one of a run that goes on.
        record.tokens_per_second_median, record.samples_per_second_median = (values.get(name) for name in _MEDIANS)
    if not _is_step(event):
        return
    record.step, record.loss = event["step"], values["train/loss"]
    record.tokens_per_second, record.samples_per_second = (values.get(name) for name in _RATES)
    record.step_seconds = values.get("throughput/step_seconds", record.step_seconds)
