"""The comparison of runs that were ticked in the list."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.responses import HTMLResponse

from ortlaunch.serve.access import Caller, Role, needs
from ortlaunch.serve.actor import Refused, Unavailable
from ortlaunch.serve.api.runs import compared
from ortlaunch.serve.database import reading
from ortlaunch.serve.index.finding import find
from ortlaunch.serve.index.listing import rows_of
from ortlaunch.serve.pages.render import render
from ortlaunch.serve.problem import Problem
from ortlaunch.serve.service import service_of
from ortlaunch.serve.waiting import in_thread

router = APIRouter(include_in_schema=False)
Viewer = Annotated[Caller, Depends(needs(Role.viewer))]
Ids = Annotated[str, Query(max_length=2048)]
MOST = 20


@router.get("/compare")
def compare(request: Request, caller: Viewer, ids: Ids = "") -> HTMLResponse:
    """The comparison: the page draws the curves at once, and asks for the tables, which take some seconds."""
    asked = _asked(ids)
    service = service_of(request)
    places = {one: find(service, one).place for one in asked}
    with reading(service.engine) as session:
        rows = rows_of(session, {}, places.values())
    names = {one: rows[place]["name"] if place in rows else one for one, place in places.items()}
    return render(request, "compare.html", caller, ids=asked, names=names)


@router.get("/compare/tables")
async def tables(request: Request, caller: Viewer, ids: Ids = "") -> HTMLResponse:
    """The tables of figures and differences."""
    return await in_thread(caller, _tables, request, caller, ids, is_long=True)


def _tables(request: Request, caller: Caller, ids: str) -> HTMLResponse:
    comparison, refusal = None, ""
    # The curves come from the run folders; the tables need MLflow, which may have no such run or not answer.
    try:
        comparison = compared(service_of(request), ",".join(_asked(ids)))
    except (Problem, Refused, Unavailable) as error:
        refusal = str(error)
    return render(request, "compare_tables.html", caller, comparison=comparison, refusal=refusal)


def _asked(ids: str) -> list[str]:
    asked = list(dict.fromkeys(one for one in ids.split(",") if one))
    if not 2 <= len(asked) <= MOST:
        raise HTTPException(422, f"choose 2 to {MOST} runs by their boxes in the list, then Compare")
    return asked
