"""`/api/audit`: who changed what."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel

from ortlaunch.serve.access import Caller, Role, needs
from ortlaunch.serve.audit import entries
from ortlaunch.serve.database import reading
from ortlaunch.serve.service import service_of
from ortlaunch.serve.tables import AuditEntry

router = APIRouter(tags=["audit"])


class AuditRow(BaseModel):
    """One entry."""

    id: int
    at: float
    user: str
    action: str
    target: str
    detail: str


class AuditPage(BaseModel):
    """A page of the audit, the newest entries first."""

    entries: list[AuditRow]
    total: int
    page: int
    pages: int


@router.get("/api/audit")
def audit(
    request: Request,
    _caller: Annotated[Caller, Depends(needs(Role.admin))],
    page: Annotated[int, Query(ge=1, le=10**6)] = 1,
    size: Annotated[int, Query(ge=1, le=200)] = 50,
    text: Annotated[str, Query(max_length=200)] = "",
) -> AuditPage:
    """Shows the audit."""
    with reading(service_of(request).engine) as session:
        found, total = entries(session, page, size, text)
        return AuditPage(entries=[_row(one) for one in found], total=total, page=page, pages=max(1, -(-total // size)))


def _row(entry: AuditEntry) -> AuditRow:
    return AuditRow(
        id=entry.id, at=entry.at, user=entry.user, action=entry.action, target=entry.target, detail=entry.detail
    )
