"""Tokens for programs: 256 bits, shown once, stored as a digest, with a highest role and an end."""

from __future__ import annotations

import time

from sqlalchemy import func, select

from ortlaunch.serve.access import Caller, Role
from ortlaunch.serve.answers import not_found
from ortlaunch.serve.audit import record
from ortlaunch.serve.database import reading, writing
from ortlaunch.serve.secret import digest, new_secret
from ortlaunch.serve.service import Service
from ortlaunch.serve.tables import Token, User
from ortlaunch.serve.unfit import unfit

MOST_DAYS = 365
_MOST_TOKENS = 50
_PREFIX = "ort_"
"""A token tells by its shape what it is, so that scanners of repositories can find it."""


def make_token(service: Service, caller: Caller, name: str, role: Role, days: int) -> tuple[Token, str]:
    """Makes a token of the caller, and returns it with its secret, which nobody can see again.

    Args:
        service: the service.
        caller: whose token it becomes.
        name: what the caller calls it.
        role: its highest role.
        days: how long it is valid.

    Raises:
        Unfit: the role is above the caller's, or the caller has too many tokens.
    """
    if role > caller.role:
        raise unfit(f"your role is {caller.role.name}: a token cannot have more", "role")
    secret, now = _PREFIX + new_secret(), time.time()
    with writing(service.engine) as session:
        mine = (Token.user_id == caller.user_id, Token.revoked.is_(None), Token.expires > now)
        if (session.scalar(select(func.count()).select_from(Token).where(*mine)) or 0) >= _MOST_TOKENS:
            raise unfit(f"you have {_MOST_TOKENS} tokens: revoke one first")
        token = Token(
            user_id=caller.user_id,
            name=name,
            digest=digest(secret),
            role=role.name,
            created=now,
            expires=now + days * 86400,
            revoked=None,
        )
        session.add(token)
        session.flush()
        record(session, caller, "token.make", str(token.id), {"name": name, "role": role.name, "days": days})
        return token, secret


def tokens_of(service: Service, caller: Caller, everybody: bool = False) -> list[tuple[Token, str]]:
    """Returns the caller's tokens, or those of everybody, each with the name of its user; the newest first."""
    query = select(Token, User.name).join(User, User.id == Token.user_id).order_by(Token.id.desc())
    if not everybody:
        query = query.where(Token.user_id == caller.user_id)
    with reading(service.engine) as session:
        return [(row[0], row[1]) for row in session.execute(query)]


def revoke_token(service: Service, caller: Caller, token_id: int) -> None:
    """Revokes a token of the caller, or as an administrator that of anybody. Open streams end within seconds.

    Raises:
        HTTPException: there is no such token for this caller.
    """
    with writing(service.engine) as session:
        token = session.get(Token, token_id)
        if token is None or (token.user_id != caller.user_id and caller.role is not Role.admin):
            raise not_found("no such token")
        token.revoked = token.revoked or time.time()
        record(session, caller, "token.revoke", str(token.id), {"name": token.name})
