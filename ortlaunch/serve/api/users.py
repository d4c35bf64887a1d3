"""`/api/users`: administrators add people and change what they may do."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Path, Request
from pydantic import BaseModel, ConfigDict, Field

from ortlaunch.serve import accounts
from ortlaunch.serve.access import Caller, Role, needs
from ortlaunch.serve.service import service_of
from ortlaunch.serve.tables import User

router = APIRouter(tags=["users"])
RoleName = Literal["viewer", "runner", "author", "admin"]
Id = Annotated[int, Path(ge=1, le=2**53)]
Admin = Annotated[Caller, Depends(needs(Role.admin, tokens=False))]
_Name = Annotated[str, Field(max_length=64)]


class NewUser(BaseModel):
    """A person to add."""

    model_config = ConfigDict(extra="forbid")
    name: _Name
    role: RoleName
    unix_user: _Name | None = None


class UserChange(BaseModel):
    """What to change; a field that is not given stays as it is."""

    model_config = ConfigDict(extra="forbid")
    role: RoleName | None = None
    unix_user: _Name | None = None
    projects: Annotated[list[_Name], Field(max_length=50)] | None = None
    disabled: bool | None = None


class UserRow(BaseModel):
    """A person."""

    id: int
    name: str
    role: str
    unix_user: str | None
    projects: list[str]
    disabled: bool
    has_password: bool
    created: float


class LinkMade(BaseModel):
    """A person, and the address where the person chooses a password once, within 24 hours."""

    user: UserRow
    link: str


@router.get("/api/users")
def list_users(request: Request, _caller: Annotated[Caller, Depends(needs(Role.admin))]) -> list[UserRow]:
    """Lists all users."""
    return [row_of(user) for user in accounts.users(service_of(request))]


@router.post("/api/users", status_code=201)
def add_user(request: Request, body: NewUser, caller: Admin) -> LinkMade:
    """Adds a user."""
    service = service_of(request)
    user, secret = accounts.add_user(service, caller, body.name, Role[body.role], body.unix_user)
    return LinkMade(user=row_of(user), link=link_url(request, secret))


@router.patch("/api/users/{user_id}")
def change_user(request: Request, user_id: Id, body: UserChange, caller: Admin) -> UserRow:
    """Changes a user's role, Unix user, or whether the user may log in."""
    role = None if body.role is None else Role[body.role]
    words = role, body.unix_user, body.disabled, body.projects
    changed = accounts.change_user(service_of(request), caller, user_id, *words)
    return row_of(changed)


@router.post("/api/users/{user_id}/link", status_code=201)
def make_link(request: Request, user_id: Id, caller: Admin) -> LinkMade:
    """Makes a one-time link by which the user chooses another password."""
    service = service_of(request)
    secret = accounts.new_link(service, caller, user_id)
    user = next(one for one in accounts.users(service) if one.id == user_id)
    return LinkMade(user=row_of(user), link=link_url(request, secret))


def row_of(user: User) -> UserRow:
    """Returns what an administrator sees of a user."""
    return UserRow(
        id=user.id,
        name=user.name,
        role=user.role,
        unix_user=user.unix_user,
        projects=user.projects,
        disabled=user.disabled,
        has_password=user.password is not None,
        created=user.created,
    )


def link_url(request: Request, secret: str) -> str:
    """Returns the address of a one-time link."""
    public = service_of(request).settings.public_url
    base = public.rstrip("/") if public else f"{request.url.scheme}://{request.url.netloc}"
    return f"{base}/link/{secret}"
