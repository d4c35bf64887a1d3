"""The list of runs, asked from the index and the queue together by one question to the database."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Select,
    Subquery,
    and_,
    case,
    exists,
    func,
    literal,
    null,
    or_,
    select,
    union_all,
)
from sqlalchemy.orm import Session, aliased

from ortlaunch.base.text import public_text
from ortlaunch.serve.api.shapes import Facets, Page, Row
from ortlaunch.serve.index.tables import IndexedRun
from ortlaunch.serve.queue.tables import OPEN_STATES, Job, JobState

MOST_ROWS = 100
"""Rows of a page."""
SORTS = ("started", "updated", "name", "experiment", "owner", "state", "step", "loss", "rate", "seconds_left")
_LONGEST = {"name": 160, "experiment": 120, "reason": 200, "owner": 64}
"""Bytes of a row's texts as JSON, so that a page of `MOST_ROWS` has less than 100 kB, whatever runs are called."""
_MOST_FACETS = 500
_FILTERS = ("state", "owner", "experiment")
_SEARCHED = ("name", "experiment", "run_id", "key", "job")
_COLUMNS = (
    *("place", "key", "run_id", "job", "name", "experiment", "owner", "state", "reason", "step", "steps", "loss"),
    *("diverged", "rate", "rate_unit", "seconds_left", "started", "updated"),
)
_BEFORE_RUNNING = (JobState.WAITING, JobState.STARTING)
_WITHOUT_RUN = (*OPEN_STATES, JobState.REFUSED, JobState.CANCELLED)
"""States of jobs that are rows of their own while there is no run folder."""


def page_of(
    session: Session, positions: Mapping[str, int], filters: Mapping[str, str], sort: str, page: int, size: int
) -> Page:
    """Returns a page of the list.

    Args:
        session: the database.
        positions: the places of the waiting jobs in the queue.
        filters: `state`, `owner`, `experiment` (each one value, or several with commas between them) and `text`, which
            is looked for in name, experiment and ids; an empty one lets all pass.
        sort: one of `SORTS`, with ``-`` before it for the largest first.
        page: counted from 1.
        size: rows of a page.
    """
    needed = {"place", "started", sort.lstrip("-"), *(name for name in _FILTERS if filters.get(name))}
    rows = _rows(frozenset(needed).union(_SEARCHED if filters.get("text") else ()))
    chosen = select(rows.c.place).where(*_conditions(rows, filters))
    total = session.scalar(select(func.count()).select_from(chosen.subquery())) or 0
    pages = max(1, -(-total // size))
    page = min(page, pages)
    column = rows.c[sort.lstrip("-")]
    order = column.desc().nulls_last() if sort.startswith("-") else column.asc().nulls_last()
    # Only folders are sorted, of which there may be ten thousand; the rest of a row is read for the page alone.
    ordered = chosen.order_by(order, rows.c.started.desc(), rows.c.place).limit(size).offset((page - 1) * size)
    places = session.scalars(ordered).all()
    return {"runs": list(rows_of(session, positions, places).values()), "total": total, "page": page, "pages": pages}


def rows_of(session: Session, positions: Mapping[str, int], places: Iterable[str]) -> dict[str, Row]:
    """Returns the rows of run folders, and of jobs whose run folders are not there yet, in the order of `places`.

    Args:
        session: the database.
        positions: the places of the waiting jobs in the queue.
        places: the folders; those that nobody knows are left out.
    """
    places = list(places)
    rows = _rows()
    found = session.execute(select(rows).where(rows.c.place.in_(places))).mappings().all()
    order = {place: number for number, place in enumerate(places)}
    return {row["place"]: _row(row, positions) for row in sorted(found, key=lambda row: order[row["place"]])}


def facets_of(session: Session) -> Facets:
    """Returns what the list can be filtered by, with the number of runs in each state."""
    rows = _rows(frozenset(_FILTERS))
    states = session.execute(select(rows.c.state, func.count()).group_by(rows.c.state)).all()
    owners = session.scalars(select(rows.c.owner).distinct().order_by(rows.c.owner).limit(_MOST_FACETS))
    experiments = session.scalars(select(rows.c.experiment).distinct().order_by(rows.c.experiment).limit(_MOST_FACETS))
    return {
        "states": dict(tuple(row) for row in states),
        "owners": list(owners),
        "experiments": list(experiments),
    }


def _row(values: Mapping[Any, Any], positions: Mapping[str, int]) -> Row:
    text = {name: shortened(public_text(values[name]), longest) for name, longest in _LONGEST.items()}
    return {
        "id": values["key"],
        "run_id": values["run_id"],
        "job": values["job"],
        "name": text["name"],
        "experiment": text["experiment"],
        "owner": text["owner"],
        "state": values["state"],
        "reason": text["reason"],
        "position": positions.get(values["job"]) if values["state"] == JobState.WAITING else None,
        "step": values["step"],
        "steps": values["steps"],
        "loss": values["loss"],
        "diverged": bool(values["diverged"]),
        "rate": values["rate"],
        "rate_unit": values["rate_unit"],
        "seconds_left": values["seconds_left"],
        "started": values["started"],
        "updated": values["updated"],
    }


@cache
def _rows(names: frozenset[str] = frozenset(_COLUMNS)) -> Subquery:
    """All rows of the list: runs, and jobs that wait or whose runs have no folder.

    Args:
        names: the columns that are needed; SQLite makes ten thousand rows of them.
    """
    wanted = [name for name in _COLUMNS if name in names]
    return union_all(_runs(wanted), _jobs(wanted)).subquery()


def _runs(names: list[str]) -> Select[Any, *tuple[Any, ...]]:
    # What waits to go on is a row of `_jobs`. SQLite makes this small set once; a join would cost for each run.
    run = aliased(IndexedRun)
    waiting = select(Job.run_dir).join_from(Job, run, run.place == Job.run_dir).where(_goes_on_soon(run))
    return select(*(getattr(IndexedRun, name) for name in names)).where(IndexedRun.place.not_in(waiting))


def _goes_on_soon(run: type[IndexedRun]) -> ColumnElement[bool]:
    """Whether a job will go on with a run whose record is still about the time before."""
    loads = and_(Job.state == JobState.RUNNING, Job.resumes, run.is_over, run.updated < Job.started)
    return or_(Job.state.in_(_BEFORE_RUNNING), loads)


def _jobs(names: list[str]) -> Select[Any, *tuple[Any, ...]]:
    run, later = IndexedRun, aliased(Job)
    has_later = exists().where(later.run_id == Job.run_id, later.run_dir == Job.run_dir, later.number > Job.number)
    columns: dict[str, Any] = {
        **{name: getattr(Job, name) for name in ("run_id", "name", "experiment", "owner", "reason")},
        **{name: getattr(run, name) for name in ("step", "loss", "rate")},
        "place": Job.run_dir,
        "key": func.coalesce(run.key, Job.run_key),
        "job": Job.id,
        # Between the start of a run and the first look at its folder.
        "state": case((Job.state == JobState.RUNNING, literal(str(JobState.STARTING))), else_=Job.state),
        "steps": func.coalesce(run.steps, Job.steps),
        "diverged": func.coalesce(run.diverged, literal(False)),
        "rate_unit": func.coalesce(run.rate_unit, ""),
        "seconds_left": null(),
        "started": func.coalesce(run.started, Job.submitted),
        "updated": func.coalesce(Job.ended, Job.started, Job.submitted),
    }
    shown = or_(_goes_on_soon(run), and_(Job.state.in_(_WITHOUT_RUN), run.place.is_(None)))
    rows = select(*(columns[name].label(name) for name in names))
    return rows.join_from(Job, run, run.place == Job.run_dir, isouter=True).where(shown, ~has_later)


def _conditions(rows: Subquery, filters: Mapping[str, str]) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = []
    for name in _FILTERS:
        if wanted := [one for one in filters.get(name, "").split(",") if one]:
            found.append(rows.c[name].in_([*wanted, filters[name]]))
    if text := filters.get("text", ""):
        found.append(or_(*(rows.c[name].icontains(text, autoescape=True) for name in _SEARCHED)))
    return found


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
