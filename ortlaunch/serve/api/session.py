"""`/api/session`: log in, see who one is, log out; `/api/link`: choose a password by a one-time link."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from ortlaunch.serve import accounts
from ortlaunch.serve.access import COOKIE, Caller, Role, needs
from ortlaunch.serve.guard import csrf_token
from ortlaunch.serve.secret import csrf_of
from ortlaunch.serve.service import service_of

router = APIRouter(tags=["session"])
_KNOWN = "__Host-ortlaunch-known"
"""The cookie of a browser in which somebody has logged in. It opens nothing, and lets nobody else's attempts count."""
_KNOWN_SECONDS = 365 * 86400
Person = Annotated[Caller, Depends(needs(Role.viewer, tokens=False))]
_Text = Annotated[str, Field(max_length=1024)]


class Login(BaseModel):
    """What logs somebody in."""

    model_config = ConfigDict(extra="forbid")
    name: _Text
    password: _Text


class LinkUse(BaseModel):
    """A password for a one-time link."""

    model_config = ConfigDict(extra="forbid")
    link: _Text
    name: _Text = ""
    password: _Text


class PasswordChange(BaseModel):
    """A password of one's own, and the one that comes after it."""

    model_config = ConfigDict(extra="forbid")
    old: _Text
    new: _Text


class Ended(BaseModel):
    """How many sessions were ended."""

    sessions: int


class LoggedIn(BaseModel):
    """What a page needs to send further requests."""

    csrf: str


class Who(BaseModel):
    """Who sends this request."""

    name: str
    role: str
    unix_user: str | None
    shared_account: bool
    csrf: str


@router.post("/api/session")
def log_in(request: Request, response: Response, body: Login) -> LoggedIn:
    """Logs in, and sets the session cookie."""
    service, mark = service_of(request), request.cookies.get(_KNOWN, "")
    secret = accounts.login(service, body.name, body.password, address_of(request), mark)
    set_cookie(response, secret)
    response.set_cookie(
        _KNOWN, accounts.mark_of(service, body.name), _KNOWN_SECONDS, path="/", secure=True, httponly=True
    )
    return LoggedIn(csrf=csrf_of(secret))


@router.post("/api/link")
def use_link(request: Request, response: Response, body: LinkUse) -> LoggedIn:
    """Sets a password by a one-time link, and logs in."""
    secret = accounts.use_link(service_of(request), body.link, body.name, body.password, address_of(request))
    set_cookie(response, secret)
    return LoggedIn(csrf=csrf_of(secret))


@router.get("/api/session")
def who(request: Request, caller: Annotated[Caller, Depends(needs(Role.viewer))]) -> Who:
    """Says who sends this request."""
    return Who(
        name=caller.name,
        role=caller.role.name,
        unix_user=caller.unix_user,
        shared_account=service_of(request).settings.shared_account,
        csrf=csrf_token(request.headers),
    )


@router.post("/api/session/password", status_code=204)
def change_password(request: Request, body: PasswordChange, caller: Person) -> None:
    """Changes one's own password. All other sessions and all tokens end."""
    accounts.change_password(service_of(request), caller, body.old, body.new, address_of(request))


@router.delete("/api/session/others")
def end_others(request: Request, caller: Person) -> Ended:
    """Ends one's sessions in all other browsers."""
    return Ended(sessions=accounts.end_other_sessions(service_of(request), caller))


@router.delete("/api/session", status_code=204)
def log_out(request: Request, response: Response, caller: Person) -> None:
    """Ends this browser's session."""
    accounts.logout(service_of(request), caller)
    clear_cookie(response)


def set_cookie(response: Response, secret: str) -> None:
    """Gives a browser its session. It ends with the browser, or after 12 hours."""
    response.set_cookie(COOKIE, secret, path="/", secure=True, httponly=True, samesite="lax")


def clear_cookie(response: Response) -> None:
    """Takes the session from a browser."""
    response.delete_cookie(COOKIE, path="/", secure=True, httponly=True, samesite="lax")


def address_of(request: Request) -> str:
    """Returns the address that a request comes from; behind a trusted proxy the one that the proxy names."""
    return request.client.host if request.client is not None else "unknown"
