"""The list of runs: the rows of all run folders, and of jobs of the queue that have none yet."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, cast

from ortlaunch.base.text import public_text
from ortlaunch.follow.state import ACTIVE, State
from ortlaunch.serve.api.shapes import Facets, Page, Row
from ortlaunch.serve.index.jobs import OfRun, lost_by, shown_state
from ortlaunch.serve.index.reading import Listed
from ortlaunch.serve.queue.tables import JobState
from ortlaunch.serve.service import Service

MOST_ROWS = 100
"""Rows of a page."""
SORTS = ("started", "updated", "name", "experiment", "owner", "state", "step", "loss", "rate", "seconds_left")
_LONGEST = {"name": 160, "experiment": 120, "reason": 200, "owner": 64}
"""Bytes of a row's texts as JSON, so that a page of `MOST_ROWS` has less than 100 kB, whatever runs are called."""
_MOST_FACETS = 500
_Values = dict[str, Any]
_OF_QUEUE = (JobState.WAITING, JobState.STARTING)
_OPEN = {*_OF_QUEUE, *(state.value for state in ACTIVE)}
_GOES_ON = (State.RUNNING.value, State.STOPPING.value)
_FILTERS = ("state", "owner", "experiment")
_SEARCHED = ("name", "experiment", "run_id", "id", "job")
_TOLD = ("run_id", "name", "experiment", "state", "reason", "step", "steps", "loss", "started")


def page_of(service: Service, filters: Mapping[str, str], sort: str, page: int, size: int) -> Page:
    """Returns a page of the list.

    Args:
        service: the service.
        filters: `state`, `owner`, `experiment` (each one value, or several with commas between them) and `text`, which
            is looked for in name, experiment and ids; an empty one lets all pass.
        sort: one of `SORTS`, with ``-`` before it for the largest first.
        page: counted from 1.
        size: rows of a page.
    """
    found = _all(service)
    for name in _FILTERS:
        if wanted := filters.get(name, ""):
            values = {wanted, *filter(None, wanted.split(","))}
            found = {place: row for place, row in found.items() if row[name] in values}
    if text := filters.get("text", "").casefold():
        found = {place: row for place, row in found.items() if _has(row, text)}
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
    return {"runs": [_public(row, positions) for row in shown], "total": total, "page": page, "pages": pages}


def rows_of(service: Service, places: Iterable[str]) -> dict[str, Row]:
    """Returns the rows of run folders, and of jobs whose run folders are not there yet, in the order of `places`.

    Args:
        service: the service.
        places: the folders; those that nobody knows are left out.
    """
    jobs, positions = service.runs.jobs.now(), service.queue.positions()
    found = {place: _row(service.runs.run_at(place), jobs.get(place)) for place in places}
    return {place: _public(row, positions) for place, row in found.items() if row is not None}


def facets_of(service: Service) -> Facets:
    """Returns what the list can be filtered by, with the number of runs in each state."""
    rows = _all(service).values()
    return {
        "states": dict(sorted(Counter(row["state"] for row in rows).items())),
        "owners": sorted({row["owner"] for row in rows})[:_MOST_FACETS],
        "experiments": sorted({row["experiment"] for row in rows})[:_MOST_FACETS],
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


def _all(service: Service) -> dict[str, _Values]:
    """All rows by their run folders, with texts that are not public yet and without places in the queue."""
    jobs, runs = service.runs.jobs.now(), service.runs.runs
    made = {place: _row(run, jobs.get(place)) for place, run in runs.items()}
    made |= {place: _row(None, of_run) for place, of_run in jobs.items() if place not in runs}
    return {place: row for place, row in made.items() if row is not None}


def _row(run: Listed | None, jobs: OfRun | None) -> _Values | None:
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
        "name": run.name,
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


def _public(row: _Values, positions: Mapping[str, int]) -> Row:
    texts = {name: shortened(public_text(row[name]), longest) for name, longest in _LONGEST.items()}
    position = positions.get(row["job"] or "") if row["state"] == JobState.WAITING else None
    return cast(Row, {**row, **texts, "position": position})


def _has(row: _Values, text: str) -> bool:
    return any(text in (row[name] or "").casefold() for name in _SEARCHED)


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
