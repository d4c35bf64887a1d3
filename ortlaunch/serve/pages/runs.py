"""The list of runs, and one run."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, HTTPException, Path, Query, Request
from fastapi.responses import HTMLResponse
from sqlalchemy import select

from ortlaunch.serve import follow
from ortlaunch.serve.access import Caller, Role, may_change, needs
from ortlaunch.serve.api.shapes import Detail, Page
from ortlaunch.serve.database import reading
from ortlaunch.serve.index.asked import MOST_COLUMNS, NEWEST_FIRST, RunQuery
from ortlaunch.serve.index.finding import find
from ortlaunch.serve.index.listing import MOST_ROWS
from ortlaunch.serve.limits import MOST_COMPARED
from ortlaunch.serve.pages.render import is_part, render
from ortlaunch.serve.queue.tables import Job
from ortlaunch.serve.service import service_of
from ortlaunch.serve.unfit import Unfit
from ortlaunch.serve.waiting import reading_run

router = APIRouter(include_in_schema=False)
Viewer = Annotated[Caller, Depends(needs(Role.viewer))]
SORTS = {
    NEWEST_FIRST: "newest first",
    "started": "oldest first",
    "-updated": "last changed first",
    "name": "by name",
    "owner": "by owner",
    "state": "by state",
    "loss": "lowest loss first",
    "-rate": "fastest first",
}
_NO_RUNS: Page = {"runs": [], "total": 0, "page": 1, "pages": 1}
AWAITED = frozenset(("waiting", "starting", "refused", "cancelled"))
"""States of a request whose run has no folder yet."""
_ENDED = frozenset(("finished", "failed", "killed", "stopped", "cancelled", "refused", "unknown"))


@router.get("/")
def runs(request: Request, caller: Viewer, query: Annotated[RunQuery, Query()]) -> HTMLResponse:
    """The list: table first, with its filters."""
    service = service_of(request)
    sort = query.sort if query.sort in SORTS else NEWEST_FIRST
    found, problem = _NO_RUNS, ""
    try:
        found = follow.list_runs(service, caller, query.model_copy(update={"sort": sort}))
    except Unfit as error:
        problem = str(error)
    kept: dict[str, Any] = {name: value for name, value in query.filters.items() if value}
    kept |= {"sort": sort} if sort != NEWEST_FIRST else {}
    kept |= {"columns": query.columns}

    def page(number: int) -> str | None:
        return "/?" + urlencode({**kept, "page": number}, doseq=True) if 1 <= number <= found["pages"] else None

    values = {
        "found": found,
        "problem": problem,
        "columns": query.columns,
        "before": page(found["page"] - 1),
        "after": page(found["page"] + 1),
        "filtered": bool(set(kept) - {"sort", "columns"}),
    }
    if is_part(request):
        return render(request, "runs_table.html", caller, **values)
    more = {"asked": query.filters, "sort": sort, "sorts": SORTS, "facets": follow.facets(service, caller)}
    return render(request, "runs.html", caller, **values, **more, most_compared=MOST_COMPARED)


@router.get("/sweeps/{sweep}")
def sweep(request: Request, caller: Viewer, sweep: Annotated[str, Path(max_length=16)]) -> HTMLResponse:
    """The runs of a sweep: what differs, how each is, and a picture of the results."""
    service = service_of(request)
    with reading(service.engine) as session:
        asked = [job.request["keys"] for job in session.scalars(select(Job).where(Job.sweep == sweep))]
    axes = [key for key in (asked[0] if asked else ()) if len({str(keys.get(key)) for keys in asked}) > 1]
    query = RunQuery(sweep=sweep, sort="started")
    results = [name for name in follow.figures(service, caller, query) if name != "train/loss"]
    columns = [*axes, *results][:MOST_COLUMNS]
    found = follow.list_runs(service, caller, query.model_copy(update={"columns": columns}), MOST_ROWS)
    if not found["runs"]:
        raise HTTPException(404, "there is no such sweep")
    runs = [{"id": row["id"], "name": row["name"], "loss": row["loss"], **row["columns"]} for row in found["runs"]]
    states = Counter(row["state"] for row in found["runs"])
    values = {
        "swept": {"axes": axes, "results": list(dict.fromkeys(["loss", *results])), "runs": runs},
        "states": states,
        "open": [row["id"] for row in found["runs"] if row["state"] not in _ENDED],
        "found": found,
        "columns": columns,
        "problem": "",
        "filtered": False,
        "before": None,
        "after": None,
    }
    template = "runs_table.html" if is_part(request) else "sweep.html"
    return render(request, template, caller, **values, axes=axes, most_compared=MOST_COMPARED)


@router.get("/runs/{run}")
async def run(request: Request, caller: Viewer, run: str) -> HTMLResponse:
    """One run."""
    return await reading_run(service_of(request), caller, run, _run, request, caller, run, "run.html")


@router.get("/runs/{run}/panel")
async def panel(request: Request, caller: Viewer, run: str) -> HTMLResponse:
    """The part of a run's page that changes with its state: figures, buttons, failures and checkpoints."""
    return await reading_run(service_of(request), caller, run, _run, request, caller, run, "run_panel.html")


def _run(request: Request, caller: Caller, run: str, template: str) -> HTMLResponse:
    service = service_of(request)
    detail = follow.run_detail(service, caller, run)
    # The row of a run from a command line has the Unix user, who may have another name here.
    may = may_change(caller, find(service, caller, run).owner)
    acts = acts_of(detail) if may else []
    return render(request, template, caller, detail=detail, row=detail["row"], acts=acts, may_change=may)


def acts_of(detail: Detail) -> list[str]:
    """Returns what the page offers to those who may change a run. The API decides by itself what they may.

    Args:
        detail: the run.
    """
    state = detail["row"]["state"]
    acts = [] if state in _ENDED or state == "stopping" else ["cancel"]
    if state in _ENDED and state not in AWAITED and state != "finished":
        acts.append("resume")
    if any(checkpoint["complete"] for checkpoint in detail["checkpoints"]):
        acts.append("export")
    return [*acts, "delete"] if state in _ENDED and state not in AWAITED else acts
