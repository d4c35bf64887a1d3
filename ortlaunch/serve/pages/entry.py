"""The pages before somebody is logged in: `/login` and the one-time links."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from ortlaunch.serve.accounts import SHORTEST_PASSWORD, link_is_for
from ortlaunch.serve.pages.render import render
from ortlaunch.serve.service import service_of

router = APIRouter(include_in_schema=False)


@router.get("/login")
def login(request: Request) -> HTMLResponse:
    """The form for name and password."""
    return render(request, "login.html", None, has_provider=service_of(request).provider is not None)


@router.get("/link/{secret}")
def link(request: Request, secret: str) -> HTMLResponse:
    """The form by which a person chooses a password, once."""
    usable, name = link_is_for(service_of(request), secret)
    values = {"secret": secret, "usable": usable, "name": name, "shortest": SHORTEST_PASSWORD}
    return render(request, "link.html", None, **values)
