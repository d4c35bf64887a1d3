"""`/api/projects`: administrators make projects and say how many slots each may hold."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request
from pydantic import BaseModel, ConfigDict, Field

from ortlaunch.serve import projects
from ortlaunch.serve.access import Caller, Role, needs
from ortlaunch.serve.service import service_of

router = APIRouter(tags=["projects"])
Admin = Annotated[Caller, Depends(needs(Role.admin, tokens=False))]
Name = Annotated[str, Path(max_length=40)]


class ProjectChange(BaseModel):
    """What a project may take; null is no limit."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    slots: Annotated[float | None, Field(gt=0, le=1e6)] = None
    """Of all its runs at a time."""


class ProjectRow(BaseModel):
    """A project."""

    name: str
    slots: float | None


@router.get("/api/projects")
def list_projects(request: Request, caller: Annotated[Caller, Depends(needs(Role.viewer))]) -> list[ProjectRow]:
    """Lists one's own projects; for administrators all."""
    found = projects.projects(service_of(request), caller)
    return [ProjectRow(name=one.name, slots=one.slots) for one in found]


@router.put("/api/projects/{name}", status_code=204)
def set_project(request: Request, name: Name, body: ProjectChange, caller: Admin) -> None:
    """Makes a project, or changes what it may take."""
    projects.set_project(service_of(request), caller, name, body.slots)


@router.delete("/api/projects/{name}", status_code=204)
def remove_project(request: Request, name: Name, caller: Admin) -> None:
    """Removes a project without members."""
    projects.remove_project(service_of(request), caller, name)
