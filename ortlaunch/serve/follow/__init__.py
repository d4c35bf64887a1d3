"""What pages and the API show of runs: one function for each question, which takes plain arguments and blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import HTTPException

from ortlaunch.base.errors import RequestError
from ortlaunch.serve.access import Caller
from ortlaunch.serve.api.shapes import Configuration, Curve, Curves, Detail, Facets, LogPart, Page
from ortlaunch.serve.database import reading
from ortlaunch.serve.follow.configuration import differences, settings_of, text_of
from ortlaunch.serve.follow.curves import MOST_POINTS, CurveCache
from ortlaunch.serve.follow.details import detail_of, nothing_yet
from ortlaunch.serve.follow.logs import MOST_BYTES, PAGE_BYTES, log_file, part, search
from ortlaunch.serve.index.asked import RunQuery
from ortlaunch.serve.index.finding import Found, find, found_run
from ortlaunch.serve.index.listing import SORTS, facets_of, page_of, rows_of, rows_that_fit
from ortlaunch.serve.queue.tables import OPEN_STATES, Job
from ortlaunch.serve.service import Service
from ortlaunch.serve.unfit import unfit

PAGE_ROWS = 50
_MOST_NAMES = 40
_FIRST = ("train/loss", "eval/loss", "throughput/tokens_per_second", "throughput/samples_per_second", "train/lr")
_CURVES = ("train/", "eval/", "throughput/", "memory/")
_POINTS = ("startup/", "summary/", "goodput/")
"""Metrics with one value each, of which there is no curve."""
_LONGEST_TEXT = 200

_curves = CurveCache()


def list_runs(service: Service, caller: Caller, query: RunQuery, size: int = PAGE_ROWS) -> Page:
    """Returns a page of the list of runs; see `ortlaunch.serve.index.listing.page_of`.

    Args:
        service: the service.
        caller: who asks.
        query: which runs, in which order, and the page.
        size: rows of a page, at most `MOST_ROWS`.

    Raises:
        Unfit: the list cannot be sorted so, or a condition cannot be read.
    """
    if query.sort.removeprefix("-") not in SORTS:
        raise unfit(
            f"the list can be sorted by {', '.join(SORTS)}, each with - before it for the largest first", "sort"
        )
    return page_of(service, caller, query, size)


def figures(service: Service, caller: Caller, query: RunQuery) -> list[str]:
    """Returns the names of the metrics that runs of the list have."""
    return sorted({name for row in rows_that_fit(service, caller, query).values() for name in row["figures"]})


def facets(service: Service, caller: Caller) -> Facets:
    """Returns what the list can be filtered by."""
    return facets_of(service, caller.view)


def run_detail(service: Service, caller: Caller, asked: str) -> Detail:
    """Returns everything about one run but its curves, logs and configuration.

    Raises:
        HTTPException: there is no such run.
    """
    found = find(service, caller, asked)
    row, run = rows_of(service, [found.place], caller.view).get(found.place), service.runs.run_at(found.place)
    with reading(service.engine) as session:
        job = session.get(Job, found.job_id) if found.job_id is not None else None
    if row is None and job is not None and job.state not in OPEN_STATES:
        raise HTTPException(404, f"the run folder is gone, {found.place}: somebody has deleted or moved it")
    if row is None:
        raise HTTPException(404, "the run is not in the index yet")
    if run is None:
        return nothing_yet(row)
    return detail_of(found.run, row, nodes=run.nodes, restarts=run.restarts, metrics=_metrics(found))


def run_metrics(
    service: Service, caller: Caller, asked: str, names: Iterable[str] = (), points: int = MOST_POINTS
) -> Curves:
    """Returns the curves of a run.

    Args:
        service: the service.
        caller: who asks.
        asked: the run's id.
        names: the metrics; without any the first forty, curves before single values.
        points: how many points a curve may have.

    Raises:
        HTTPException: there is no such run.
        Unfit: its journal cannot be read.
    """
    found = find(service, caller, asked)
    wanted = list(names)[:_MOST_NAMES]
    most = max(2, min(points, MOST_POINTS))
    try:
        if not wanted:
            wanted = sorted(_curves.curves(found.place, (), most).names, key=_place)
        read = _curves.curves(found.place, wanted[:_MOST_NAMES], most)
    except FileNotFoundError:
        nothing: Curve = {"steps": [], "values": []}
        return {"id": found.id, "curves": {}, "names": [], "began": 0.0, "times": nothing, "offset": 0}
    except OSError as error:
        raise unfit(f"the journal cannot be read: {error.strerror}", None) from error
    return {"id": found.id, **read._asdict()}  # type: ignore[typeddict-item]


def _place(name: str) -> tuple[int, int, str]:
    """Where a metric comes among all of a run."""
    if name in _FIRST:
        return 0, _FIRST.index(name), name
    return 1 if name.startswith(_CURVES) else 3 if name.startswith(_POINTS) else 2, 0, name


def run_log(
    service: Service,
    caller: Caller,
    asked: str,
    rank: str,
    *,
    offset: int | None = None,
    limit: int = PAGE_BYTES,
    word: str = "",
) -> LogPart:
    """Returns a part of a log, or with `word` the lines that have it; see `ortlaunch.serve.follow.logs`.

    Raises:
        HTTPException: there is no such run or log.
    """
    found = found_run(service, caller, asked)
    file = log_file(found.run, rank)
    try:
        if file is None:
            raise FileNotFoundError
        if word:
            return search(found.run, file, rank, max(0, offset or 0), word[:_LONGEST_TEXT])
        return part(found.run, file, rank, offset, max(1, min(limit, MOST_BYTES)))
    except OSError:
        raise HTTPException(404, "the run has no such log, or it cannot be read") from None


def run_settings(service: Service, caller: Caller, asked: str) -> dict[str, Any]:
    """Returns a run's configuration, without secrets.

    Raises:
        HTTPException: there is no such run.
        Unfit: its configuration cannot be read.
    """
    run = found_run(service, caller, asked).run
    try:
        return settings_of(run)
    except RequestError as error:
        raise unfit(str(error), None) from error


def configuration(settings: dict[str, Any], other: dict[str, Any] | None) -> Configuration:
    """Returns a run's configuration, and how that of another run differs.

    Args:
        settings: from `run_settings`.
        other: that of the other run.
    """
    differ = None if other is None else differences(settings, other)
    return {"text": text_of(settings), "differences": differ}


def _metrics(found: Found) -> list[str]:
    try:
        return _curves.curves(found.place, (), MOST_POINTS).names
    except OSError:
        return []
