"""The list of runs: the rows of all run folders, and of jobs of the queue that have none yet."""

from __future__ import annotations

import json
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, cast

from sqlalchemy import select

from ortlaunch.base.text import public_text
from ortlaunch.follow.state import ACTIVE, State
from ortlaunch.serve.access import Caller, is_seen
from ortlaunch.serve.api.shapes import Facets, Page, Row
from ortlaunch.serve.database import reading
from ortlaunch.serve.index.asked import RunQuery
from ortlaunch.serve.index.jobs import OfRun, QueueJob, lost_by, shown_state
from ortlaunch.serve.index.reading import Listed
from ortlaunch.serve.projects import of_unix_users
from ortlaunch.serve.queue.tables import JobState
from ortlaunch.serve.service import Service
from ortlaunch.serve.tables import RunNote
from ortlaunch.serve.unfit import unfit

MOST_ROWS = 100
"""Rows of a page."""
SORTS = ("started", "updated", "name", "experiment", "owner", "state", "step", "loss", "rate", "seconds_left")
_LONGEST = {"name": 160, "experiment": 120, "reason": 200, "owner": 64, "note": 160}
"""Bytes of a row's texts as JSON, so that a page of `MOST_ROWS` has less than 100 kB, whatever runs are called."""
_MOST_FACETS = 500
_NOBODY: Mapping[str, str] = {}
_Values = dict[str, Any]
_OF_QUEUE = (JobState.WAITING, JobState.STARTING)
_OPEN = {*_OF_QUEUE, *(state.value for state in ACTIVE)}
_GOES_ON = (State.RUNNING.value, State.STOPPING.value)
_FILTERS = ("state", "owner", "experiment", "project", "sweep")
_LONGEST_TEXT, _MOST_NAMES = 200, 80
_FIGURES = ("step", "loss", "rate")
"""Figures of every row, for conditions."""
_SEARCHED = ("name", "experiment", "run_id", "id", "job", "note")
_CONDITION = re.compile(r"\s*([\w./@-]+)\s*(<=|>=|!=|=|<|>)\s*(\S.*?)\s*")
_HOLDS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_TOLD = ("run_id", "name", "experiment", "state", "reason", "step", "steps", "loss", "started")


def page_of(service: Service, caller: Caller, query: RunQuery, size: int) -> Page:
    """Returns a page of the list.

    Args:
        service: the service.
        caller: who asks.
        query: which runs, in which order, and the page.
        size: rows of a page.

    Raises:
        Unfit: a condition cannot be read.
    """
    found, page, sort = rows_that_fit(service, caller, query), query.page, query.sort
    # The newest first, and what has no value last, whatever the order is.
    rows = sorted(sorted(found.items(), key=lambda one: one[0]), key=lambda one: one[1]["started"], reverse=True)
    column = sort.lstrip("-")
    with_value = [one for one in rows if one[1][column] is not None]
    without = [one for one in rows if one[1][column] is None]
    with_value.sort(key=lambda one: one[1][column], reverse=sort.startswith("-"))
    total = len(rows)
    pages = max(1, -(-total // size))
    page = min(page, pages)
    shown = [row for _, row in [*with_value, *without][(page - 1) * size : page * size]]
    positions = service.queue.positions()
    runs = [_public(row, positions, query.columns) for row in shown]
    return {"runs": runs, "total": total, "page": page, "pages": pages}


def rows_that_fit(service: Service, caller: Caller, query: RunQuery) -> dict[str, _Values]:
    """Returns the rows of the runs that a query means, by their run folders. Their texts are not public yet.

    Raises:
        Unfit: a condition cannot be read.
    """
    found = _all(service, caller.view)
    for name in _FILTERS:
        if wanted := query.filters[name]:
            values = {wanted, *filter(None, wanted.split(","))}
            found = {place: row for place, row in found.items() if row[name] in values}
    if text := query.text[:_LONGEST_TEXT].casefold():
        found = {place: row for place, row in found.items() if _has(row, text)}
    for condition in filter(str.strip, query.where.split(",")):
        holds = _condition(condition)
        found = {place: row for place, row in found.items() if holds(row)}
    return found


def rows_of(service: Service, places: Iterable[str], view: frozenset[str] | None) -> dict[str, Row]:
    """Returns the rows of run folders, and of jobs whose run folders are not there yet, in the order of `places`.

    Args:
        service: the service.
        places: the folders; those that nobody knows are left out.
        view: the projects of those who ask; see `Caller.view`.
    """
    jobs, positions = service.runs.jobs.now(), service.queue.positions()
    notes, people = _told(service)
    found = {place: _row(service.runs.run_at(place), jobs.get(place), notes.get(place), people) for place in places}
    return {place: _public(row, positions) for place, row in _seen(found, view).items()}


def facets_of(service: Service, view: frozenset[str] | None) -> Facets:
    """Returns what the list can be filtered by, with the number of runs in each state; see `rows_of`."""
    rows = _all(service, view).values()
    return {
        "states": dict(sorted(Counter(row["state"] for row in rows).items())),
        "owners": sorted({row["owner"] for row in rows})[:_MOST_FACETS],
        "projects": sorted({row["project"] for row in rows} - {""})[:_MOST_FACETS],
        "experiments": sorted({row["experiment"] for row in rows})[:_MOST_FACETS],
        "columns": [name for name, _ in Counter(name for row in rows for name in _named(row)).most_common(_MOST_NAMES)],
    }


def ended(service: Service, since: float) -> list[dict[str, Any]]:
    """Returns the runs that have ended after a time, with what others are told of them."""
    jobs = service.runs.jobs.now()
    found: list[dict[str, Any]] = []
    for place, run in service.runs.runs.items():
        of_run = jobs.get(place)
        row = _row(run, of_run)
        if row is None or row["state"] in _OPEN:
            continue
        lost = lost_by(run, of_run)
        at = run.ended if lost is None else lost.ended
        if at is not None and at > since:
            told = {name: row[name] for name in _TOLD}
            found.append({"key": run.key, **told, "ended": at, "checkpoint": run.checkpoint})
    return found


def _all(service: Service, view: frozenset[str] | None) -> dict[str, _Values]:
    """All rows by their run folders, with texts that are not public yet and without places in the queue."""
    jobs, runs = service.runs.jobs.now(), service.runs.runs
    notes, people = _told(service)
    made = {place: _row(run, jobs.get(place), notes.get(place), people) for place, run in runs.items()}
    made |= {place: _row(None, of_run, notes.get(place)) for place, of_run in jobs.items() if place not in runs}
    return _seen(made, view)


def _seen(rows: Mapping[str, _Values | None], view: frozenset[str] | None) -> dict[str, _Values]:
    return {place: row for place, row in rows.items() if row is not None and is_seen(row["project"], view)}


def _told(service: Service) -> tuple[dict[str, RunNote], dict[str, str]]:
    """Returns the notes by run folder, and the projects of Unix users, which runs of command lines belong to."""
    with reading(service.engine) as session:
        notes = {one.place: one for one in session.scalars(select(RunNote))}
        return notes, of_unix_users(service, session)


def _named(row: _Values) -> dict[str, Any]:
    """The parameters and metrics of a row."""
    return {**{name: row[name] for name in _FIGURES}, **row["params"], **row["figures"]}


def _condition(text: str) -> Callable[[_Values], bool]:
    """Returns what a condition says of a row. A row without the value fits none."""
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise unfit(f"{text.strip()}: a condition is NAME, one of {' '.join(_HOLDS)}, and a value", "where")
    name, sign, wanted = found.groups()

    def holds(row: _Values) -> bool:
        value = _named(row).get(name)
        if value is None:
            return False
        with suppress(ValueError):
            return _HOLDS[sign](float(value), float(wanted))
        return sign in ("=", "!=") and _HOLDS[sign](str(value), wanted)

    return holds


def _row(
    run: Listed | None, jobs: OfRun | None, note: RunNote | None = None, people: Mapping[str, str] = _NOBODY
) -> _Values | None:
    shown = shown_state(run, jobs)
    if shown is None:
        return None
    state, reason = shown
    is_queued = jobs is not None and (run is None or state in _OF_QUEUE)
    # A run that waits to go on is that job's; before and after it belongs to the job that has begun.
    job = None if jobs is None else jobs.latest if is_queued else jobs.begun
    updated = run.updated if run is not None else 0.0
    if is_queued and job is not None:
        updated = job.ended or job.started or job.submitted
    run = run or _not_begun(jobs)
    return {
        "id": run.key,
        "run_id": run.run_id,
        "job": job.id if job is not None else None,
        "name": (note.title if note is not None else "") or run.name,
        "experiment": run.experiment,
        "owner": job.owner if job is not None else run.unix_user,
        "state": state,
        "reason": reason,
        "position": None,
        "step": run.step,
        "steps": run.steps if run.steps is not None or job is None else job.steps,
        "loss": run.loss,
        "diverged": run.diverged,
        "rate": run.rate,
        "rate_unit": run.rate_unit,
        "seconds_left": run.seconds_left if state in _GOES_ON else None,
        "started": run.started,
        "updated": updated,
        "project": job.project if job is not None else people.get(run.unix_user, ""),
        "sweep": job.sweep if job is not None else None,
        "tags": note.tags if note is not None else [],
        "note": note.note if note is not None else "",
        "params": {**(_sent(job) if job is not None else {}), **run.params},
        "figures": run.figures,
    }


def _not_begun(jobs: OfRun | None) -> Listed:
    """What the list has of a job without a run folder."""
    assert jobs is not None
    job = jobs.latest
    return Listed(
        place=job.run_dir,
        key=job.run_key,
        run_id=job.run_id,
        name=job.name,
        experiment=job.experiment,
        started=job.submitted,
        updated=job.submitted,
        state=job.state,
        reason=job.reason,
    )


def _sent(job: QueueJob) -> dict[str, str]:
    return {key: str(value) for key, value in job.request.get("keys", {}).items()}


def _public(row: _Values, positions: Mapping[str, int], columns: Iterable[str] = ()) -> Row:
    named, row = _named(row), {name: value for name, value in row.items() if name not in ("params", "figures")}
    texts = {name: shortened(public_text(row[name]), longest) for name, longest in _LONGEST.items()}
    position = positions.get(row["job"] or "") if row["state"] == JobState.WAITING else None
    values = {name: named.get(name) for name in columns}
    shown = {name: shortened(public_text(one), 60) if isinstance(one, str) else one for name, one in values.items()}
    return cast(Row, {**row, **texts, "position": position, "columns": shown})


def _has(row: _Values, text: str) -> bool:
    return any(text in (one or "").casefold() for one in (*(row[name] for name in _SEARCHED), *row["tags"]))


def shortened(text: str, longest: int) -> str:
    """Returns a text that has at most so many bytes as JSON, with … where something was cut."""
    if len(text) * 6 <= longest or len(_json(text)) <= longest:
        return text
    text = text[:longest]
    while text and len(_json(text)) + 3 > longest:
        text = text[: len(text) * 9 // 10]
    return f"{text}…"


def _json(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False)[1:-1].encode(errors="replace")
