"""The pages before somebody is logged in: `/login` and the one-time links."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from ortlaunch.serve.accounts import SHORTEST_PASSWORD, link_is_for, login_known
from ortlaunch.serve.api.session import address_of, set_cookie
from ortlaunch.serve.identity import named_by_proxy
from ortlaunch.serve.pages.render import render
from ortlaunch.serve.service import service_of

router = APIRouter(include_in_schema=False)


@router.get("/login")
def login(request: Request, next: Annotated[str, Query(max_length=2048)] = "/") -> Response:
    """The form for name and password; whom the proxy vouches for is logged in at once."""
    if (name := named_by_proxy(request)) is not None:
        is_here = next.startswith("/") and not next.startswith(("//", "/\\")) and next.isprintable()
        answer = RedirectResponse(next if is_here else "/", 303)
        set_cookie(answer, login_known(service_of(request), name, address_of(request)))
        return answer
    return render(request, "login.html", None, has_provider=service_of(request).provider is not None)


@router.get("/link/{secret}")
def link(request: Request, secret: str) -> HTMLResponse:
    """The form by which a person chooses a password, once."""
    usable, name = link_is_for(service_of(request), secret)
    values = {"secret": secret, "usable": usable, "name": name, "shortest": SHORTEST_PASSWORD}
    return render(request, "link.html", None, **values)
