"""Who may do what. A route names the role that it needs, by `needs`; a route that names none stops the service's start.

A request shows who sends it by a token (`Authorization: Bearer …`) or by the session cookie. If it has the header, the
cookie does not count: only then may `guard` let it pass without looking for a forged request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from fastapi import HTTPException, Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.routing import BaseRoute, Mount, Route

from ortlaunch.base.user import account_name
from ortlaunch.serve.database import reading
from ortlaunch.serve.identity import named_by_proxy
from ortlaunch.serve.limits import Bucket, TooManyRequests
from ortlaunch.serve.secret import digest
from ortlaunch.serve.service import Service, service_of
from ortlaunch.serve.tables import LoginSession, Token, User

COOKIE = "__Host-ortlaunch"
"""The session cookie. With this prefix, browsers take it from this host alone, with Secure, and for all paths."""
PUBLIC = frozenset(
    {
        ("GET", "/health"),
        ("POST", "/api/session"),
        ("POST", "/api/link"),
        ("GET", "/login"),
        ("GET", "/link/{secret}"),
        ("GET", "/oidc"),
        ("GET", "/oidc/callback"),
    }
)
"""The routes that need no role, because nobody has one yet."""
PUBLIC_FOLDERS = frozenset({"/static"})
_ROLE = "ortlaunch_role"
_TOKENS = "ortlaunch_tokens"
_LOG_IN = "log in first, or send a token that is valid"
_CHALLENGE = {"WWW-Authenticate": "Bearer"}


class Role(IntEnum):
    """What somebody may do; each role may do what those before it may."""

    viewer = 1
    """Look at everything."""
    runner = 2
    """Start ready jobs, with bounded keys; stop, resume and delete own runs."""
    author = 3
    """Also run code of their own: `model.target`, imports, lines before the start."""
    admin = 4
    """Also users, the queue, the audit and the runs of others."""


@dataclass(frozen=True)
class Caller:
    """Who sends a request."""

    user_id: int
    name: str
    role: Role
    """The role of the user, or the lower one of the token."""
    unix_user: str | None
    """As whom the runs of this person start; None: nobody has said it yet."""
    token_id: int | None = None
    session_id: int | None = None
    projects: tuple[str, ...] = ()

    @property
    def view(self) -> frozenset[str] | None:
        """The projects whose runs the person sees; None for all."""
        return None if self.role is Role.admin else frozenset(self.projects)

    def sees(self, project: str) -> bool:
        """Whether the person sees what belongs to a project."""
        return is_seen(project, self.view)


def is_seen(project: str, view: frozenset[str] | None) -> bool:
    """Whether what belongs to a project is seen by those who see these projects; see `Caller.view`."""
    return not project or view is None or project in view


def needs(role: Role, *, tokens: bool = True) -> Callable[[Request], Caller]:
    """Returns the dependency that lets only callers of this role or a higher one pass, and gives the caller.

    Args:
        role: the least role.
        tokens: whether a program may do it too. What would outlive a stolen token, such as an account, a link or
            another token, is for people who have logged in.
    """

    def dependency(request: Request) -> Caller:
        caller = _caller(request)
        if caller.token_id is not None and not tokens:
            raise HTTPException(403, "a token may not do this: log in on the page")
        if caller.role < role:
            whose = "yours is" if caller.token_id is None else "that of this token is"
            raise HTTPException(403, f"this needs the role {role.name}, {whose} {caller.role.name}")
        return caller

    setattr(dependency, _ROLE, role)
    setattr(dependency, _TOKENS, tokens)
    return dependency


def may_change(caller: Caller, owner: str) -> bool:
    """Whether somebody may stop, resume or delete what belongs to `owner`."""
    return caller.role is Role.admin or (caller.role >= Role.runner and caller.name == owner)


def still_allowed(service: Service, caller: Caller, role: Role = Role.viewer) -> bool:
    """Whether a caller may still do what was allowed when a stream was opened.

    Args:
        service: the service.
        caller: who opened it.
        role: the least role.
    """
    with reading(service.engine) as session:
        return allowed(session, caller, role)


def those_allowed(service: Service, callers: Collection[Caller]) -> set[Caller]:
    """Returns those of some callers who may still look, by one question for each table.

    Args:
        service: the service.
        callers: who has opened streams.
    """
    asked = (
        (User, {one.user_id for one in callers}),
        (Token, {one.token_id for one in callers}),
        (LoginSession, {one.session_id for one in callers}),
    )
    with reading(service.engine) as session:
        # `allowed` finds in the session what was read here, as long as somebody holds it.
        _held = [session.scalars(select(table).where(table.id.in_(ids))).all() for table, ids in asked if any(ids)]
        return {caller for caller in callers if allowed(session, caller, Role.viewer)}


def allowed(session: Session, caller: Caller, role: Role) -> bool:
    """As `still_allowed`, in the transaction of what the caller does."""
    now = time.time()
    user = session.get(User, caller.user_id)
    if user is None or user.disabled or Role[user.role] < role or not set(caller.projects) <= set(user.projects):
        return False
    if caller.token_id is not None:
        token = session.get(Token, caller.token_id)
        return token is not None and token.revoked is None and token.expires > now and Role[token.role] >= role
    login = session.get(LoginSession, caller.session_id)
    return login is not None and login.expires > now


def require_unchanged(service: Service, session: Session, caller: Caller) -> None:
    """Refuses a request whose caller was judged some time ago, if the answer would be another one now.

    Args:
        service: the service.
        session: the transaction of what the caller does.
        caller: who was judged.

    Raises:
        HTTPException: 401 for one who is locked out, 403 for one whose role is lower, 409 for one whose runs belong to
            another Unix user.
    """
    if not allowed(session, caller, Role.viewer):
        raise HTTPException(401, _LOG_IN, _CHALLENGE)
    if not allowed(session, caller, caller.role):
        raise HTTPException(403, f"your role is not {caller.role.name} any more")
    if _unix_user(service, session.get_one(User, caller.user_id)) != caller.unix_user:
        raise HTTPException(409, "your Unix user was changed meanwhile: send the request again")


def caller_or_none(request: Request) -> Caller | None:
    """Returns who sends a request; None if nobody is logged in. For pages that all may see."""
    try:
        return _caller(request)
    except HTTPException:
        return None


def require_roles(routes: Iterable[BaseRoute]) -> None:
    """Refuses routes that name no role, or several, unless they are public.

    Args:
        routes: the routes of the service.

    Raises:
        RuntimeError: the message names the route.
    """
    for route in routes:
        if isinstance(route, Mount) and route.path in PUBLIC_FOLDERS:
            continue
        if not isinstance(route, Route | APIRoute):
            raise RuntimeError(f"{route}: only routes with a role and public folders are allowed")
        roles = _roles(route.dependant) if isinstance(route, APIRoute) else []
        for method in (route.methods or set()) - {"HEAD"}:
            public = (method, route.path) in PUBLIC
            if len(roles) != (0 if public else 1):
                wanted = "no role, since it is public" if public else "exactly one role (access.needs)"
                raise RuntimeError(f"{method} {route.path}: it has {len(roles)} roles and must have {wanted}")


def role_of(route: APIRoute) -> Role | None:
    """Returns the role that a route needs; None for a public one."""
    roles = _roles(route.dependant)
    return roles[0] if roles else None


def takes_tokens(route: APIRoute) -> bool:
    """Whether a program may use a route by its token."""
    return all(_values(route.dependant, _TOKENS))


def _roles(dependant: Dependant) -> list[Role]:
    return _values(dependant, _ROLE)


def _values(dependant: Dependant, name: str) -> list[Any]:
    own = [getattr(dependant.call, name)] if hasattr(dependant.call, name) else []
    return own + [value for one in dependant.dependencies for value in _values(one, name)]


def _caller(request: Request) -> Caller:
    known = getattr(request.state, "caller", None)
    if isinstance(known, Caller):
        return known
    service = service_of(request)
    header = request.headers.get("authorization")
    found = _of_token(service, header) if header is not None else _of_cookie(service, request.cookies.get(COOKIE))
    named = named_by_proxy(request)
    if found is not None and found.session_id is not None and named is not None and named.lower() != found.name:
        # Another person has logged in at the proxy since.
        found = None
    if found is None:
        raise HTTPException(401, _LOG_IN, _CHALLENGE)
    request.state.caller = found
    return found


def _of_token(service: Service, header: str) -> Caller | None:
    kind, _, secret = header.partition(" ")
    if kind.lower() != "bearer":
        return None
    with reading(service.engine) as session:
        query = select(Token, User).join(User, User.id == Token.user_id).where(Token.digest == digest(secret.strip()))
        row = session.execute(query).one_or_none()
    if row is None or row.User.disabled or row.Token.revoked is not None or row.Token.expires <= time.time():
        return None
    _count(service.limits.token, str(row.Token.id), "with this token")
    role = min(Role[row.User.role], Role[row.Token.role])
    return _who(service, row.User, role, token_id=row.Token.id)


def _of_cookie(service: Service, secret: str | None) -> Caller | None:
    if not secret:
        return None
    with reading(service.engine) as session:
        query = select(LoginSession, User).join(User, User.id == LoginSession.user_id)
        row = session.execute(query.where(LoginSession.digest == digest(secret))).one_or_none()
    if row is None or row.User.disabled or row.LoginSession.expires <= time.time():
        return None
    _count(service.limits.session, str(row.LoginSession.id), "with this session")
    return _who(service, row.User, Role[row.User.role], session_id=row.LoginSession.id)


def _who(service: Service, user: User, role: Role, **by: int) -> Caller:
    return Caller(user.id, user.name, role, _unix_user(service, user), projects=tuple(user.projects), **by)


def _count(bucket: Bucket, key: str, whose: str) -> None:
    try:
        bucket.take(key)
    except TooManyRequests as error:
        raise HTTPException(429, f"too many requests {whose}", {"Retry-After": str(error.seconds)}) from None


def _unix_user(service: Service, user: User) -> str | None:
    return account_name() if service.settings.shared_account else user.unix_user
