"""`GET /api/events`: one stream of events for a browser, with all topics that its tabs show."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query
from fastapi.responses import Response

from ortlaunch.serve.access import Caller, Role, needs
from ortlaunch.serve.service import Service, service_of

router = APIRouter()


@router.get("/api/events", response_class=Response)
def events(
    service: Annotated[Service, Depends(service_of)],
    caller: Annotated[Caller, Depends(needs(Role.viewer))],
    topics: Annotated[str, Query(max_length=8192)],
    last: Annotated[str, Query(max_length=8192)] = "",
    last_event_id: Annotated[str, Header(max_length=8192)] = "",
) -> Response:
    """A stream of events. Topics are list, run:ID and log:ID:RANK, with commas between them.

    `last` is the id of the last event that was received; the header Last-Event-ID means the same. The stream then
    goes on exactly after it. A topic with @POSITION begins there.
    """
    stream: Response = service.streams.open(caller, topics, last_event_id or last)
    return stream
