"""The form of a new run: its fields come from the schema; checking and sending are the API's."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse

from ortlaunch.serve import submitting
from ortlaunch.serve.access import Caller, Role, needs
from ortlaunch.serve.fields import CHOICES, PARAMS, is_choice, jobs_to_choose
from ortlaunch.serve.pages.render import render
from ortlaunch.serve.requests import MOST_SWEPT, OF_SCRIPT
from ortlaunch.serve.service import service_of
from ortlaunch.serve.waiting import in_thread

router = APIRouter(include_in_schema=False)
_Text = Annotated[str, Query(max_length=200)]
_OPEN = frozenset((CHOICES, "train"))
"""The groups whose fields are shown at once."""
_TYPES = {bool: "flag", int: "integer", float: "number"}


@router.get("/submit")
async def submit(
    request: Request, caller: Annotated[Caller, Depends(needs(Role.runner))], job: _Text = "", again: _Text = ""
) -> HTMLResponse:
    """The fields of a ready job, of chosen groups, or of a run that is made again."""
    return await in_thread(caller, _form, request, caller, job, again)


def _form(request: Request, caller: Caller, job: str, again: str) -> HTMLResponse:
    service = service_of(request)
    keys: dict[str, Any] = {}
    left_out: list[str] = []
    minutes, script = None, ""
    if again:
        made = submitting.keys_of(service, caller, again)
        job, keys, left_out, minutes = made["job"] or "", made["keys"], made["left_out"], made["minutes"]
        script = made["script"]
    asked = {name: value for name, value in request.query_params.items() if name not in ("job", "again")}
    choices = {key: value for key, value in keys.items() if is_choice(key)} | asked
    keys = {key: value for key, value in keys.items() if key not in choices}
    found = submitting.fields_for(service, caller, job or None, choices)
    fields = [*found["fields"], *_further(keys, found["fields"])]
    for field in fields:
        # A group that nothing chooses has its default.
        if field["group"] == CHOICES and field["value"] is None:
            field["value"] = field["default"]
    groups: dict[str, list[dict[str, Any]]] = {}
    for field in fields:
        groups.setdefault(field["group"], []).append(field)
    settable = {field["key"] for field in fields if field["may_set"]}
    values = {
        "job": job,
        "again": again,
        "keys": keys,
        "kept": sorted(choices),
        "minutes": minutes,
        "script": script,
        "may_script": caller.role >= Role.author,
        "most_swept": MOST_SWEPT,
        # The parameters of a script are those of a sweep that it was a run of.
        "params": {key: value for key, value in keys.items() if key.startswith(OF_SCRIPT)},
        "left_out": [*left_out, *(key for key in keys if key not in settable and not key.startswith(OF_SCRIPT))],
        "groups": groups,
        "open_groups": _OPEN,
        "jobs": jobs_to_choose(),
        "limits": submitting.limits_for(service, caller),
    }
    return render(request, "submit.html", caller, **values)


def _further(keys: dict[str, Any], fields: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fields of parameters that a run has given to a model of one's own, which the schema does not know."""
    known = {field["key"] for field in fields}
    return [
        {
            "key": key,
            "group": "model",
            "type": _TYPES.get(type(value), "text"),
            "default": None,
            "value": None,
            "meaning": "A parameter of the model.",
            "nullable": True,
            "bounds": "",
            "choices": [],
            "may_set": True,
        }
        for key, value in keys.items()
        if key.startswith(PARAMS) and key not in known
    ]
