"""`/api/queue`: what waits, what runs and why; and what administrators change."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request
from pydantic import BaseModel, ConfigDict, Field

from ortlaunch.serve import queueing
from ortlaunch.serve.access import Caller, Role, needs
from ortlaunch.serve.service import service_of

router = APIRouter(tags=["queue"])
Viewer = Annotated[Caller, Depends(needs(Role.viewer))]
Admin = Annotated[Caller, Depends(needs(Role.admin))]


class Drain(BaseModel):
    """The slots to take out; none named means all."""

    model_config = ConfigDict(extra="forbid")
    slots: Annotated[list[Annotated[str, Field(max_length=20)]] | None, Field(max_length=4096)] = None


class Priority(BaseModel):
    """A priority; jobs of a higher one come first."""

    model_config = ConfigDict(extra="forbid")
    priority: Annotated[int, Field(ge=-1000, le=1000)]


@router.get("/api/queue")
def queue(request: Request, caller: Viewer) -> dict[str, Any]:
    """The slots, the jobs that wait with position and reason, those that run, and the users' shares."""
    return queueing.queue_state(service_of(request), caller)


@router.post("/api/queue/pause")
def pause(request: Request, caller: Admin) -> dict[str, Any]:
    """Starts no further run."""
    queueing.set_paused(service_of(request), caller, paused=True)
    return queueing.queue_state(service_of(request), caller)


@router.post("/api/queue/continue")
def go_on(request: Request, caller: Admin) -> dict[str, Any]:
    """Starts runs again, on all slots."""
    queueing.set_paused(service_of(request), caller, paused=False)
    return queueing.queue_state(service_of(request), caller)


@router.post("/api/queue/drain")
def drain(request: Request, caller: Admin, body: Drain | None = None) -> dict[str, Any]:
    """Lets running runs go on and gives their slots to no other: all slots, or those named."""
    queueing.drain(service_of(request), caller, body.slots if body is not None else None)
    return queueing.queue_state(service_of(request), caller)


@router.post("/api/queue/{job_id}/priority")
def priority(
    request: Request, job_id: Annotated[str, Path(max_length=20)], body: Priority, caller: Admin
) -> dict[str, Any]:
    """Gives a waiting job another priority."""
    return queueing.set_priority(service_of(request), caller, job_id, body.priority)
