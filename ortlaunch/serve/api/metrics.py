"""`GET /metrics`: for Prometheus, which sends a token of a viewer."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from ortlaunch.serve.access import Caller, Role, needs
from ortlaunch.serve.metrics import exposition
from ortlaunch.serve.service import Service, service_of

router = APIRouter()


@router.get("/metrics", response_class=Response)
def metrics(
    service: Annotated[Service, Depends(service_of)], caller: Annotated[Caller, Depends(needs(Role.viewer))]
) -> Response:
    """The figures of the service in Prometheus' text format."""
    return Response(exposition(service), media_type=CONTENT_TYPE_LATEST)
