"""The comparison of runs that were ticked in the list."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse

from ortlaunch.serve.access import Caller, Role, needs
from ortlaunch.serve.actor import Refused
from ortlaunch.serve.comparison import compared, runs_of
from ortlaunch.serve.index.finding import find
from ortlaunch.serve.index.listing import rows_of
from ortlaunch.serve.pages.render import render
from ortlaunch.serve.service import service_of
from ortlaunch.serve.unfit import Unavailable, Unfit
from ortlaunch.serve.waiting import in_thread

router = APIRouter(include_in_schema=False)
Viewer = Annotated[Caller, Depends(needs(Role.viewer))]
Ids = Annotated[str, Query(max_length=2048)]


@router.get("/compare")
def compare(request: Request, caller: Viewer, ids: Ids = "") -> HTMLResponse:
    """The comparison: the page draws the curves at once, and asks for the tables, which take some seconds."""
    asked = runs_of(ids)
    service = service_of(request)
    places = {one: find(service, caller, one).place for one in asked}
    rows = rows_of(service, places.values(), caller.view)
    names = {one: rows[place]["name"] if place in rows else one for one, place in places.items()}
    # The trials of a tuning, and runs that were made again, have one name.
    often = {name for name, count in Counter(names.values()).items() if count > 1}
    names = {one: f"{name} ({one.rpartition('-')[2]})" if name in often else name for one, name in names.items()}
    return render(request, "compare.html", caller, ids=asked, names=names)


@router.get("/compare/tables")
async def tables(request: Request, caller: Viewer, ids: Ids = "") -> HTMLResponse:
    """The tables of figures and differences."""
    return await in_thread(caller, _tables, request, caller, ids, is_long=True)


def _tables(request: Request, caller: Caller, ids: str) -> HTMLResponse:
    comparison, refusal = None, ""
    try:
        comparison = compared(service_of(request), caller, ids)
    except (Unfit, Refused, Unavailable) as error:
        refusal = str(error)
    return render(request, "compare_tables.html", caller, comparison=comparison, refusal=refusal)
