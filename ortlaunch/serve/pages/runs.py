"""The list of runs, and one run."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse

from ortlaunch.serve import follow
from ortlaunch.serve.access import Caller, Role, may_change, needs
from ortlaunch.serve.api.shapes import Detail
from ortlaunch.serve.follow.asked import NEWEST_FIRST, RunQuery
from ortlaunch.serve.index.finding import find
from ortlaunch.serve.limits import MOST_COMPARED
from ortlaunch.serve.pages.render import is_part, render
from ortlaunch.serve.service import service_of
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
AWAITED = frozenset(("waiting", "starting", "refused", "cancelled"))
"""States of a request whose run has no folder yet."""
_ENDED = frozenset(("finished", "failed", "killed", "stopped", "cancelled", "refused", "unknown"))


@router.get("/")
def runs(request: Request, caller: Viewer, query: Annotated[RunQuery, Query()]) -> HTMLResponse:
    """The list: table first, with its filters."""
    service = service_of(request)
    sort = query.sort if query.sort in SORTS else NEWEST_FIRST
    found = follow.list_runs(service, caller, query.model_copy(update={"sort": sort}))
    kept = {name: value for name, value in query.filters.items() if value}
    kept |= {"sort": sort} if sort != NEWEST_FIRST else {}
    values = {
        "found": found,
        "before": "/?" + urlencode({**kept, "page": found["page"] - 1}) if found["page"] > 1 else None,
        "after": "/?" + urlencode({**kept, "page": found["page"] + 1}) if found["page"] < found["pages"] else None,
        "filtered": bool(set(kept) - {"sort"}),
    }
    if is_part(request):
        return render(request, "runs_table.html", caller, **values)
    more = {"asked": query.filters, "sort": sort, "sorts": SORTS, "facets": follow.facets(service, caller)}
    return render(request, "runs.html", caller, **values, **more, most_compared=MOST_COMPARED)


@router.get("/runs/{run}")
async def run(request: Request, caller: Viewer, run: str) -> HTMLResponse:
    """One run."""
    return await reading_run(service_of(request), run, _run, request, caller, run, "run.html")


@router.get("/runs/{run}/panel")
async def panel(request: Request, caller: Viewer, run: str) -> HTMLResponse:
    """The part of a run's page that changes with its state: figures, buttons, failures and checkpoints."""
    return await reading_run(service_of(request), run, _run, request, caller, run, "run_panel.html")


def _run(request: Request, caller: Caller, run: str, template: str) -> HTMLResponse:
    service = service_of(request)
    detail = follow.run_detail(service, caller, run)
    # The row of a run from a command line has the Unix user, who may have another name here.
    acts = acts_of(detail) if may_change(caller, find(service, run).owner) else []
    return render(request, template, caller, detail=detail, row=detail["row"], acts=acts)


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
