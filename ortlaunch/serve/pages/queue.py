"""The queue: slots, what waits and why, and the administrators' buttons."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse

from ortlaunch.serve import queueing
from ortlaunch.serve.access import Caller, Role, needs
from ortlaunch.serve.allowance import LIMITS, limits_of
from ortlaunch.serve.database import reading
from ortlaunch.serve.pages.render import is_part, render
from ortlaunch.serve.service import service_of

router = APIRouter(include_in_schema=False)


@router.get("/queue")
def queue(request: Request, caller: Annotated[Caller, Depends(needs(Role.viewer))]) -> HTMLResponse:
    """The state of the queue."""
    state = queueing.queue_state(service_of(request), caller)
    with reading(service_of(request).engine) as session:
        limits = limits_of(session)
    template = "queue_state.html" if is_part(request) else "queue.html"
    return render(request, template, caller, queue=state, limits=limits, limited=LIMITS)
