"""Users, tokens and the audit."""

from __future__ import annotations

import time
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse

from ortlaunch.serve import accounts, projects, tokens
from ortlaunch.serve.access import Caller, Role, needs
from ortlaunch.serve.audit import entries
from ortlaunch.serve.database import reading
from ortlaunch.serve.pages.render import is_part, render
from ortlaunch.serve.service import service_of

router = APIRouter(include_in_schema=False)
Viewer = Annotated[Caller, Depends(needs(Role.viewer))]
Admin = Annotated[Caller, Depends(needs(Role.admin))]
_MEANINGS = {
    Role.viewer: "looks at everything",
    Role.runner: "starts ready jobs, within bounds; stops, resumes and deletes their own runs",
    Role.author: "also runs code of their own",
    Role.admin: "also users, the queue, the audit and the runs of others",
}
_AUDIT_SIZE = 50


@router.get("/users")
def users(request: Request, caller: Admin) -> HTMLResponse:
    """Who may log in, and as what."""
    service, template = service_of(request), "users_table.html" if is_part(request) else "users.html"
    return render(
        request,
        template,
        caller,
        users=accounts.users(service),
        projects=projects.projects(service, caller),
        meanings=_MEANINGS,
    )


@router.get("/tokens")
def my_tokens(request: Request, caller: Viewer) -> HTMLResponse:
    """Tokens for programs."""
    template = "tokens_table.html" if is_part(request) else "tokens.html"
    found = [token for token, _ in tokens.tokens_of(service_of(request), caller, False)]
    roles = {role: meaning for role, meaning in _MEANINGS.items() if role <= caller.role}
    values = {"tokens": found, "now": time.time(), "roles": roles, "most_days": tokens.MOST_DAYS}
    values["shortest"] = accounts.SHORTEST_PASSWORD
    return render(request, template, caller, **values)


@router.get("/audit")
def audit(
    request: Request,
    caller: Admin,
    page: Annotated[int, Query(ge=1, le=10**6)] = 1,
    text: Annotated[str, Query(max_length=200)] = "",
) -> HTMLResponse:
    """Who changed what."""
    with reading(service_of(request).engine) as session:
        found, total = entries(session, page, _AUDIT_SIZE, text)
    pages = max(1, -(-total // _AUDIT_SIZE))
    kept = {"text": text} if text else {}
    values = {
        "entries": found,
        "total": total,
        "page": page,
        "pages": pages,
        "text": text,
        "before": "/audit?" + urlencode({**kept, "page": page - 1}) if page > 1 else None,
        "after": "/audit?" + urlencode({**kept, "page": page + 1}) if page < pages else None,
    }
    return render(request, "audit_table.html" if is_part(request) else "audit.html", caller, **values)
