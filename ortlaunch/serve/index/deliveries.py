"""Notes that runs have ended, for the webhooks. It is done in the transaction that writes the run's end."""

from __future__ import annotations

import json
import time
from typing import Any

from sqlalchemy import select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.orm import Session

from ortlaunch.serve.index.reading import Reading
from ortlaunch.serve.index.tables import Delivery, Webhook

EVENT = "run.ended"
_LATEST_SECONDS = 7 * 86400.0
"""An end that is older than this is not told any more, for example after the service was down for long."""
_TOLD = ("run_id", "name", "experiment", "state", "reason", "step", "steps", "loss", "started", "ended", "checkpoint")


def note_ends(session: Session, ended: list[Reading]) -> None:
    """Writes a message to each webhook for each run that has ended; one that is there already stays as it is.

    Args:
        session: the transaction.
        ended: the runs.
    """
    if not ended:
        return
    now = time.time()
    for webhook in session.scalars(select(Webhook)):
        for one in ended:
            if one.values["ended"] > max(webhook.made, now - _LATEST_SECONDS):
                _note(session, webhook, one, now)


def _note(session: Session, webhook: Webhook, one: Reading, now: float) -> None:
    values: dict[str, Any] = {
        "webhook_id": webhook.id,
        "place": one.place,
        "ended": one.values["ended"],
        "body": body(one.values),
        "due": now,
        "tries": 0,
        "problem": "",
    }
    # A run that is read again, also for an index that is made anew, has one message for each of its ends.
    session.execute(insert(Delivery).values(values).on_conflict_do_nothing())


def body(values: dict[str, Any]) -> str:
    """Returns the message about a run, as JSON."""
    return json.dumps({"event": EVENT, "id": values["key"], "run": {name: values[name] for name in _TOLD}})
