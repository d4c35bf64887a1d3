"""Everything that the page of one run shows beside its curves and logs, read from its folder."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from ortlaunch.base.errors import RequestError
from ortlaunch.base.secrets import redacted
from ortlaunch.base.text import public_text
from ortlaunch.run import failure, goodput
from ortlaunch.run.checkpoints import META, step_of
from ortlaunch.run.events import is_count
from ortlaunch.run.folders import folder_at
from ortlaunch.run.journal import iterate
from ortlaunch.run.manifest import NAME as MANIFEST
from ortlaunch.run.record import Record, read_record
from ortlaunch.run.run import Run
from ortlaunch.serve.api.shapes import (
    Change,
    CheckpointShape,
    Detail,
    FailureShape,
    FileShape,
    Goodput,
    Kept,
    LauncherShape,
    MlflowShape,
    Row,
)
from ortlaunch.serve.follow.beneath import files_beneath, folders_beneath, open_beneath, opened_path, read_beneath
from ortlaunch.serve.follow.configuration import changes, settings_of
from ortlaunch.serve.follow.logs import clean, logs_of

_MOST_FAILURES = 20
_MOST_CHECKPOINTS = 50
_MOST_KEPT = 24
_LARGEST_SMALL_FILE = 1 << 20
_LARGEST_ACCOUNT = 32 << 20
"""Of a run that goes on, the account is made from a journal up to this size."""
_PARTS = ("productive", "startup", "evaluation", "checkpoint", "lost", "down", "other", "wall")
_LONGEST_MESSAGE = 8000
_LATEST = 253_402_300_800
"""The year 10000, in seconds since the epoch."""
_DEEPEST = 3
"""Folders of a checkpoint within each other."""


def detail_of(run: Run, row: Row, *, nodes: int, restarts: int, metrics: list[str]) -> Detail:
    """Returns what the page of one run shows.

    Args:
        run: the run.
        row: its row of the list.
        nodes: its machines.
        restarts: how often its scheduler has started it again.
        metrics: the names of its metrics.
    """
    record, problems = _record(run)
    changed, mlflow = _of_settings(run, problems)
    ranks, logs = logs_of(run)
    return {
        "row": row,
        "place": str(run.path),
        "changed": changed,
        "failures": _failures(run, record),
        "checkpoints": checkpoints_of(run),
        "goodput": _goodput(run, record, is_over=row["seconds_left"] is None and row["state"] not in _GOES_ON),
        "launcher": _launcher(record, nodes, restarts),
        "mlflow": mlflow,
        "ranks": ranks,
        "logs": logs,
        "files": files_of(run),
        "kept": kept_by_hooks(run),
        "metrics": metrics,
        "problems": problems,
    }


_GOES_ON = ("running", "stopping", "starting", "queued", "pending", "requeued")


def files_of(run: Run) -> list[FileShape]:
    """Returns the files of a run that can be fetched, apart from those of checkpoints."""
    found = {name: one for name, one in files_beneath(run.path).items() if name in _records(run)}
    folders = {one.name for one in (run.logs, run.failures, run.stacks, run.weights, run.onnx, run.profile)}
    for folder in sorted(folders | {name for name in folders_beneath(run.path) if _is_exported(run, name)}):
        files = {f"{folder}/{name}": one for name, one in files_beneath(run.path, folder).items()}
        found |= {name: one for name, one in files.items() if may_fetch(run, name)}
    return [{"name": name, "size": one.st_size, "changed": one.st_mtime} for name, one in found.items()]


def kept_by_hooks(run: Run) -> list[Kept]:
    """Returns the newest pictures and texts that hooks have kept, the newest first."""
    found = sorted(_beneath(run, run.logged.name), key=lambda one: -one[1].st_mtime)[:_MOST_KEPT]
    return [
        {"name": name, "at": one.st_mtime, "text": None if name.endswith(".png") else _text(run, name)}
        for name, one in found
    ]


def _beneath(run: Run, folder: str, depth: int = 0) -> Iterator[tuple[str, os.stat_result]]:
    for name, one in files_beneath(run.path, folder).items():
        if name.endswith((".png", ".txt")):
            yield f"{folder}/{name}", one
    if depth < _DEEPEST:
        for name in folders_beneath(run.path, folder):
            yield from _beneath(run, f"{folder}/{name}", depth + 1)


def _text(run: Run, name: str) -> str:
    try:
        with open_beneath(run.path, name) as file:
            return clean(file.read(_LONGEST_MESSAGE), b"\n", is_cut=True)
    except OSError:
        return ""


def may_fetch(run: Run, name: str) -> bool:
    """Whether a file of a run folder is one that people may fetch: records, logs and results, nothing else."""
    first, *more = name.split("/")
    if any(part.startswith(".") for part in (first, *more)):
        return False
    folders = (run.logs, run.failures, run.stacks, run.weights, run.onnx, run.profile, run.checkpoints, run.logged)
    if not more:
        return first in _records(run)
    return first in {folder.name for folder in folders} or _is_exported(run, first)


def _is_exported(run: Run, folder: str) -> bool:
    """Whether a folder has the weights that were exported from a checkpoint."""
    checkpoint = Path(folder.removeprefix(run.weights_of("").name))
    return step_of(checkpoint) is not None and run.weights_of(checkpoint.name).name == folder


def checkpoints_of(run: Run) -> list[CheckpointShape]:
    """Returns a run's checkpoints, the newest first."""
    folders = [name for name in folders_beneath(run.path, run.checkpoints.name) if step_of(Path(name)) is not None]
    newest = sorted(folders, key=lambda name: step_of(Path(name)) or 0, reverse=True)[:_MOST_CHECKPOINTS]
    return [_checkpoint(run, name) for name in newest]


def _checkpoint(run: Run, name: str) -> CheckpointShape:
    place = f"{run.checkpoints.name}/{name}"
    files = files_beneath(run.path, place)
    loss = _json(run, f"{place}/{META}").get("eval_loss")
    is_number = isinstance(loss, float) and math.isfinite(loss)
    return {
        "name": name,
        "step": step_of(Path(name)) or 0,
        "at": max((one.st_mtime for one in files.values()), default=0.0),
        "size": _size(run, place),
        "complete": MANIFEST in files,
        "eval_loss": loss if is_number else None,
    }


def _size(run: Run, place: str) -> int:
    """The bytes of a checkpoint by its manifest; without one those that were written up to now."""
    listed = _json(run, f"{place}/{MANIFEST}").get("files")
    if not isinstance(listed, dict):
        return _written(run, place)
    sizes = [one.get("size") for one in listed.values() if isinstance(one, dict)]
    return sum(size for size in sizes if is_count(size) and size >= 0)


def _written(run: Run, place: str, depth: int = 0) -> int:
    here = sum(one.st_size for one in files_beneath(run.path, place).values())
    if depth == _DEEPEST:
        return here
    inner = folders_beneath(run.path, place)
    return here + sum(_written(run, f"{place}/{name}", depth + 1) for name in inner)


def _records(run: Run) -> set[str]:
    return {path.name for path in (*run.records, run.journal_file)}


def _record(run: Run) -> tuple[Record | None, list[str]]:
    try:
        record = read_record(folder_at(run.path))
    except (RequestError, OSError) as error:
        return None, [public_text(str(error))]
    return record, [f"{one.path.name} cannot be read: {public_text(one.why)}" for one in record.damage]


def _of_settings(run: Run, problems: list[str]) -> tuple[list[Change], MlflowShape | None]:
    try:
        settings = settings_of(run)
        tracking = settings.get("tracking")
        uri = tracking.get("uri") if isinstance(tracking, dict) else None
        run_id = _json(run, run.relay_file.name).get("mlflow_run_id")
        if not isinstance(run_id, str):
            return changes(settings), None
        return changes(settings), _mlflow(public_text(run_id)[:64], uri if isinstance(uri, str) else "")
    except RequestError as error:
        problems.append(public_text(str(error)))
        return [], None


def _mlflow(run_id: str, uri: str) -> MlflowShape:
    return {"run_id": run_id, "store": public_text(redacted(uri)), "url": _mlflow_page(run_id, uri)}


def _mlflow_page(run_id: str, uri: str) -> str | None:
    """The page of a run on a tracking server, without the credentials of its URI: browsers ask for their own."""
    try:
        parts = urlsplit(uri)
    except ValueError:
        return None
    host = parts.netloc.rpartition("@")[2]
    if parts.scheme not in ("http", "https") or not host:
        return None
    base = public_text(f"{parts.scheme}://{host}{parts.path.rstrip('/')}")
    return f"{base}/#/runs/{quote(run_id, safe='', errors='replace')}"


def _failures(run: Run, record: Record | None) -> list[FailureShape]:
    found: list[FailureShape] = []
    for name in list(files_beneath(run.path, run.failures.name))[:_MOST_FAILURES]:
        one = failure.parsed(_json(run, f"{run.failures.name}/{name}"))
        if one is not None:
            message = "\n".join(public_text(line) for line in one.message[-_LONGEST_MESSAGE:].splitlines())
            # A whole number may be too large for a float.
            at = one.time if 0 <= one.time < _LATEST else 0.0
            found.append({"rank": one.rank, "host": public_text(one.host), "message": message, "at": at})
    if not found and record is not None and record.state.failure:
        at = (record.state.ended_at or record.state.last or 0) / 1000
        found.append({"rank": 0, "host": "", "message": public_text(record.state.failure), "at": at})
    return sorted(found, key=lambda one: one["at"])


def _goodput(run: Run, record: Record | None, *, is_over: bool) -> Goodput | None:
    """The account of the run's time: as it was journalled at its end, else made from the journal."""
    figures = record.state.figures if record is not None else {}
    if not is_over or "summary/goodput_percent" not in figures:
        figures = _account(run, None if is_over else time.time())
    parts = {name: figures[key] for name in _PARTS if (key := f"goodput/{name}_seconds") in figures}
    share = figures.get("summary/goodput_percent")
    # Another program may have written the journal, and only some of these figures.
    if share is None or not all(map(math.isfinite, (share, *parts.values()))) or not parts.get("wall"):
        return None
    return {"share": share / 100, "parts": parts}


def _account(run: Run, now: float | None) -> dict[str, float]:
    try:
        with opened_path(run.path, run.journal_file.name) as path:
            if path.stat().st_size > _LARGEST_ACCOUNT:
                return {}
            return goodput.goodput(iterate(path), now).metrics()
    except OSError:
        return {}


def _launcher(record: Record | None, nodes: int, restarts: int) -> LauncherShape:
    if record is None:
        return {"name": "local", "place": "", "job_id": None, "nodes": nodes, "restarts": restarts}
    host = record.launcher.host if record.launcher is not None else ""
    return {
        "name": public_text(record.scheduler or "local"),
        "place": public_text(host),
        "job_id": record.job_id,
        "nodes": nodes,
        "restarts": restarts,
    }


def _json(run: Run, name: str) -> dict[str, Any]:
    """A small file of a run folder; empty where it cannot be read."""
    try:
        content = json.loads(read_beneath(run.path, name, _LARGEST_SMALL_FILE))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def nothing_yet(row: Row) -> Detail:
    """Returns what the page shows of a job whose run has no folder yet."""
    return {
        "row": row,
        "place": "",
        "changed": [],
        "failures": [],
        "checkpoints": [],
        "goodput": None,
        "launcher": {"name": "", "place": "", "job_id": None, "nodes": 0, "restarts": 0},
        "mlflow": None,
        "ranks": [],
        "logs": [],
        "files": [],
        "kept": [],
        "metrics": [],
        "problems": [],
    }
