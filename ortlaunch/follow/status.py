"""`ortlaunch status RUN`: prints everything that is known about one run."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any, NamedTuple

from ortlaunch.base.arguments import Parser
from ortlaunch.base.ownership import why_foreign
from ortlaunch.base.text import counted, json_text, moment, say
from ortlaunch.follow.find import HELP, find_run
from ortlaunch.follow.rows import Row, Survey, damage_lines, title_of
from ortlaunch.follow.state import State
from ortlaunch.follow.table import duration_text, rate_text
from ortlaunch.run.folders import RunFolder
from ortlaunch.run.record import Record, read_record
from ortlaunch.run.state import OUTAGE_TAG
from ortlaunch.tracking.destination import has_store


def status(arguments: list[str]) -> int:
    """Runs `ortlaunch status`.

    Args:
        arguments: the command line after the verb.

    Raises:
        RequestError: no run or several match.
    """
    options = _parser().parse_args(arguments)
    row, record, _ = look(find_run(options.run))
    if options.json:
        print(json_text(_document(row, record)))
        return 0
    for line in damage_lines(record.damage):
        say(f"ortlaunch: {line}", file=sys.stderr)
    lines = _lines(row, record)
    width = max(len(label) for label, _ in lines) + 1
    for label, text in lines:
        say(f"{label + ':':<{width}} {text}")
    return 0


class Look(NamedTuple):
    """One run as it is now."""

    row: Row
    record: Record
    problem: str
    """Why the scheduler of its job could not be asked; empty if it has answered, and for a run without a job."""


def look(folder: RunFolder, max_age: float = 0.0) -> Look:
    """Reads one run's folder, and asks the scheduler of its job.

    Args:
        folder: its run folder.
        max_age: greatest age of a scheduler's cached answer, in seconds.
    """
    record, survey = read_record(folder), Survey([folder], max_age)
    row = survey.row_of(record)
    return Look(row, record, survey.problem_of(row))


def _document(row: Row, record: Record) -> dict[str, Any]:
    return row.as_dict() | {
        "job": record.job,
        "stop_requested": record.stop,
        "failure": record.state.failure,
        "mlflow_run_id": record.run.mlflow_run_id(),
        "tags": record.tags,
        "logs": [str(path) for path in sorted(record.run.logs.glob("*.log"))],
    }


def _lines(row: Row, record: Record) -> list[tuple[str, str]]:
    lines = [
        ("run", f"{row.name} ({row.run_id}) of the experiment {row.experiment}"),
        ("state", row.state.value + (f": {row.reason}" if row.reason else "")),
        ("run folder", row.run_dir),
        ("not yours", f"it {why}" if (why := why_foreign(record.folder.path)) else ""),
        ("where", _where(row)),
        ("stands still", "" if row.is_over else record.state.standing),
        ("steps", _steps(row)),
        ("figures" if row.has_median else "latest", _figures(row)),
        ("began", _began(row, record)),
        ("restarts", str(row.restarts) if row.restarts else ""),
        ("why requeued", record.tags.get("ortlaunch.requeue_reason", "")),
        ("time limit", f"in {duration_text(row.limit_seconds)}" if row.limit_seconds is not None else ""),
        ("checkpoint", row.checkpoint),
        ("mlflow run", record.run.mlflow_run_id() or ""),
        ("failure", record.state.failure if row.state is State.FAILED and record.state.failure != row.reason else ""),
        ("tracker", "" if row.is_over else record.tags.get(OUTAGE_TAG, "")),
        ("not sent", _unsent_end(row, record)),
        *_advice(row),
    ]
    return [(label, text) for label, text in lines if text]


def _unsent_end(row: Row, record: Record) -> str:
    """Returns what to do about a run that has ended and whose record MLflow lacks in part; empty for others."""
    if not row.is_over:
        return ""
    if record.run.mlflow_run_id() is None:
        if not has_store(record.folder.path):
            return ""
        said = "MLflow does not have it"
    elif record.ended is None:
        said = "MLflow shows it as running"
    elif record.run.unsent_bytes():
        said = "MLflow lacks the end of its record"
    else:
        return ""
    return f"{said}: {shlex.join(['ortlaunch', 'sync', str(row.run_dir)])}"


def _where(row: Row) -> str:
    nodes = counted(row.nodes, "node") if row.nodes > 1 or row.job_id else ""
    job = f"{title_of(row.launcher)} job {row.job_id}" if row.job_id else "this machine's torchrun"
    return ", ".join(part for part in (job, nodes, row.node_list) if part)


def _steps(row: Row) -> str:
    if not row.step and row.steps is None:
        return ""
    share = f" ({100 * (row.step or 0) // row.steps} %)" if row.steps else ""
    left = f", {duration_text(row.left_seconds)} left" if row.left_seconds is not None else ""
    return f"{row.step or 0} of {row.steps or 'unknown'}{share}{left}"


def _figures(row: Row) -> str:
    """Returns the run's figures as text: the medians if it has ended with some, else those of its latest log step."""
    last, median = ("last ", " (median)") if row.has_median else ("", "")
    parts = [f"{last}loss {row.last_loss:.4g}"] if row.last_loss is not None else []
    tokens, samples = row.rates
    if tokens is not None:
        parts.append(f"{rate_text(tokens)} tokens/s{median}")
    elif samples is not None:
        parts.append(f"{rate_text(samples)} samples/s{median}")
    return ", ".join(parts)


def _began(row: Row, record: Record) -> str:
    if record.began is None:
        return ""
    text = moment(record.began / 1000)
    attempts = record.state.attempts
    part = f"in attempt {attempts}" if attempts > 1 else "in all" if row.is_over else "so far"
    return f"{text}, {duration_text(row.elapsed_seconds)} {part}"


def _advice(row: Row) -> list[tuple[str, str]]:
    name = shlex.quote(row.run_id)
    if row.state in (State.STOPPED, State.FAILED, State.KILLED) and row.checkpoint:
        return [("go on", f"ortlaunch resume {name}")]
    if row.state in (State.RUNNING, State.STOPPING):
        return [("watch", f"ortlaunch logs {name} -f --log steps")]
    return [("look", f"ortlaunch logs {name}")] if row.state in (State.FAILED, State.KILLED) else []


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="ortlaunch status", description="Say in which state one run is, and why.")
    parser.add_argument("run", metavar="RUN", help=HELP)
    parser.add_argument("--json", action="store_true", help="for programs: one object, with exact values")
    return parser
