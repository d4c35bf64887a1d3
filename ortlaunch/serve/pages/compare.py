"""The comparison of runs that were ticked in the list."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.responses import HTMLResponse

from ortlaunch.serve import follow
from ortlaunch.serve.access import Caller, Role, needs
from ortlaunch.serve.actor import Refused, Unavailable
from ortlaunch.serve.api.runs import compare as compared
from ortlaunch.serve.pages.render import render
from ortlaunch.serve.problem import Problem
from ortlaunch.serve.service import service_of

router = APIRouter(include_in_schema=False)
MOST = 20


@router.get("/compare")
def compare(
    request: Request,
    caller: Annotated[Caller, Depends(needs(Role.viewer))],
    ids: Annotated[str, Query(max_length=4000)] = "",
) -> HTMLResponse:
    """Tables of figures and differences; the page draws the curves."""
    service = service_of(request)
    asked = list(dict.fromkeys(one for one in ids.split(",") if one))
    if not 2 <= len(asked) <= MOST:
        raise HTTPException(422, f"choose 2 to {MOST} runs by their boxes in the list, then Compare")
    names = {one: follow.run_detail(service, caller, one)["row"]["name"] for one in asked}
    comparison, refusal = None, ""
    # The curves come from the run folders; the tables need MLflow, which may have no such run or not answer.
    try:
        comparison = compared(service, caller, ",".join(asked))
    except (Problem, Refused, Unavailable) as error:
        refusal = str(error)
    values = {"ids": asked, "names": names, "comparison": comparison, "refusal": refusal}
    return render(request, "compare.html", caller, **values)
