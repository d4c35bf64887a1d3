"""The form of a new run: its fields come from the schema; checking and sending are the API's."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse

from ortlaunch.serve import offers
from ortlaunch.serve.access import Caller, Role, needs
from ortlaunch.serve.pages.render import render
from ortlaunch.serve.service import service_of

router = APIRouter(include_in_schema=False)
_Text = Annotated[str, Query(max_length=200)]


@router.get("/submit")
def submit(
    request: Request, caller: Annotated[Caller, Depends(needs(Role.runner))], job: _Text = "", again: _Text = ""
) -> HTMLResponse:
    """The fields of a ready job, of chosen groups, or of a run that is made again."""
    service = service_of(request)
    keys: dict[str, Any] = {}
    if again:
        made = offers.keys_of(service, caller, again)
        job, keys = made.get("job") or "", made["keys"]
    chosen = {name: value for name, value in request.query_params.items() if name not in ("job", "again")}
    may_compose = caller.role >= Role.author
    groups: dict[str, list[Any]] = {}
    if job or may_compose:
        for field in offers.fields_for(service, caller, job or None, chosen)["fields"]:
            groups.setdefault(field["group"], []).append(field)
    values = {
        "job": job,
        "again": again,
        "keys": keys,
        "groups": groups,
        "open_groups": {"choices", "train"},
        "may_compose": may_compose,
        "jobs": offers.ready_jobs(service, caller),
    }
    return render(request, "submit.html", caller, **values)
