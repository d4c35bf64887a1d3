"""The audit: who changed what, and when. Nothing that is a secret gets into it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from ortlaunch.base.secrets import hidden
from ortlaunch.base.text import printable, public_text
from ortlaunch.serve.access import Caller
from ortlaunch.serve.tables import AuditEntry

_LONGEST = 4000


def record(
    session: Session,
    caller: Caller | None,
    action: str,
    target: str,
    detail: Mapping[str, Any] | None = None,
) -> None:
    """Adds an entry, in the transaction of what it is about.

    Args:
        session: the session that writes.
        caller: who did it; None for somebody who is not logged in.
        action: what was done, such as ``run.cancel``.
        target: what it was done to.
        detail: further facts. Values whose name or shape says that they are secret are hidden.
    """
    text = json.dumps(hidden("", dict(detail or {})), ensure_ascii=False, default=str)
    entry = AuditEntry(
        at=time.time(),
        user_id=None if caller is None else caller.user_id,
        user="" if caller is None else caller.name,
        action=action,
        target=public_text(target)[:_LONGEST],
        # `hidden` has looked at each value. As one text, "keys": {…} would count as a secret whole.
        detail=printable(text)[:_LONGEST],
    )
    session.add(entry)


def entries(session: Session, page: int, size: int, text: str = "") -> tuple[list[AuditEntry], int]:
    """Returns a page of the audit, the newest entries first, and how many entries there are.

    Args:
        session: the session that reads.
        page: its number, from 1.
        size: entries of a page.
        text: only entries whose user, action or target contain it.
    """
    query = select(AuditEntry)
    if text:
        columns = (AuditEntry.user, AuditEntry.action, AuditEntry.target)
        wanted = [column.icontains(text, autoescape=True) for column in columns]
        query = query.where(wanted[0] | wanted[1] | wanted[2])
    total = session.scalar(select(func.count()).select_from(query.subquery())) or 0
    newest = query.order_by(AuditEntry.id.desc()).limit(size).offset((page - 1) * size)
    return list(session.scalars(newest)), total
