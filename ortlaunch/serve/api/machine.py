"""`/api/machine`: what this machine and each run on it take."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request

from ortlaunch.serve.access import Caller, Role, needs
from ortlaunch.serve.service import service_of

router = APIRouter(tags=["machine"])


@router.get("/api/machine")
def machine(
    request: Request,
    caller: Annotated[Caller, Depends(needs(Role.viewer))],
    minutes: Annotated[int, Query(ge=0, le=1440)] = 60,
) -> dict[str, Any]:
    """The machine's cores, memory, disk and GPUs by run: now, and each minute of the last `minutes`."""
    found: dict[str, Any] = service_of(request).machine.as_dict(minutes, caller)
    return found
