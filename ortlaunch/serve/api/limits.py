"""`/api/limits`: what the people of each role may take of this machine."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field

from ortlaunch.serve import allowance
from ortlaunch.serve.access import Caller, Role, needs
from ortlaunch.serve.database import reading
from ortlaunch.serve.service import service_of

router = APIRouter(tags=["limits"])
_Amount = Annotated[float | None, Field(gt=0, le=1e9)]


class RoleLimits(BaseModel):
    """What one role may take; null is no limit."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    slots: _Amount = None
    """Of one person at a time."""
    hours: _Amount = None
    """Of one run, as the next ones."""
    memory: _Amount = None
    """GiB of the machine's main memory."""
    disk: _Amount = None
    """GiB of the run folder."""


@router.get("/api/limits")
def limits(request: Request, _caller: Annotated[Caller, Depends(needs(Role.viewer))]) -> dict[str, RoleLimits]:
    """The limits of each role."""
    with reading(service_of(request).engine) as session:
        return {role: RoleLimits(**found) for role, found in allowance.limits_of(session).items()}


@router.put("/api/limits/{role}", status_code=204)
def set_limits(
    request: Request,
    role: Literal["runner", "author", "admin"],
    body: RoleLimits,
    caller: Annotated[Caller, Depends(needs(Role.admin, tokens=False))],
) -> None:
    """Sets the limits of a role, for what is submitted from now on."""
    allowance.set_limits(service_of(request), caller, role, body.model_dump())
