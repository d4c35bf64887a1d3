"""`/api/tokens`: tokens for programs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field

from ortlaunch.serve import tokens
from ortlaunch.serve.access import Caller, Role, needs
from ortlaunch.serve.api.users import Id, RoleName
from ortlaunch.serve.service import service_of
from ortlaunch.serve.tables import Token

router = APIRouter(tags=["tokens"])


class NewToken(BaseModel):
    """A token to make."""

    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(min_length=1, max_length=100)]
    role: RoleName
    days: Annotated[int, Field(ge=1, le=tokens.MOST_DAYS)] = 90


class TokenRow(BaseModel):
    """A token, without its secret."""

    id: int
    name: str
    user: str
    role: str
    created: float
    expires: float
    revoked: float | None


class TokenMade(BaseModel):
    """A new token with its secret, which is shown here and never again."""

    token: TokenRow
    secret: str


@router.get("/api/tokens")
def list_tokens(
    request: Request, caller: Annotated[Caller, Depends(needs(Role.viewer))], everybody: bool = False
) -> list[TokenRow]:
    """Lists one's own tokens; for an administrator those of everybody, on request."""
    service = service_of(request)
    found = tokens.tokens_of(service, caller, everybody and caller.role is Role.admin)
    return [row_of(token, user) for token, user in found]


@router.post("/api/tokens", status_code=201)
def make_token(
    request: Request, body: NewToken, caller: Annotated[Caller, Depends(needs(Role.viewer, tokens=False))]
) -> TokenMade:
    """Makes a token."""
    token, secret = tokens.make_token(service_of(request), caller, body.name, Role[body.role], body.days)
    return TokenMade(token=row_of(token, caller.name), secret=secret)


@router.delete("/api/tokens/{token_id}", status_code=204)
def revoke_token(request: Request, token_id: Id, caller: Annotated[Caller, Depends(needs(Role.viewer))]) -> None:
    """Revokes a token."""
    tokens.revoke_token(service_of(request), caller, token_id)


def row_of(token: Token, user: str) -> TokenRow:
    """Returns what is shown of a token."""
    return TokenRow(
        id=token.id,
        name=token.name,
        user=user,
        role=token.role,
        created=token.created,
        expires=token.expires,
        revoked=token.revoked,
    )
