"""`/api/webhooks`: addresses that are told when a run ends. For administrators."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import func, select

from ortlaunch.base.text import public_text
from ortlaunch.serve.access import Caller, Role, needs
from ortlaunch.serve.answers import not_found
from ortlaunch.serve.api.users import Id
from ortlaunch.serve.audit import record
from ortlaunch.serve.database import reading, writing
from ortlaunch.serve.index.tables import Delivery, Webhook
from ortlaunch.serve.secret import new_secret
from ortlaunch.serve.service import Service, service_of
from ortlaunch.serve.unfit import unfit
from ortlaunch.serve.webhooks import problem_of

router = APIRouter(tags=["webhooks"])
Shared = Annotated[Service, Depends(service_of)]
Administrator = Annotated[Caller, Depends(needs(Role.admin))]
_MOST = 20


class NewWebhook(BaseModel):
    """A webhook to add."""

    model_config = ConfigDict(extra="forbid")
    url: Annotated[str, Field(min_length=8, max_length=2000)]


class WebhookRow(BaseModel):
    """A webhook, without its secret."""

    id: int
    url: str
    made_by: str
    made: float
    delivered: int
    waiting: int
    given_up: int
    problem: str
    """Why the latest message that failed was not taken."""


class WebhookMade(BaseModel):
    """A new webhook with the key of its signatures, which is shown here and never again."""

    id: int
    secret: str


@router.get("/api/webhooks")
def list_webhooks(service: Shared, caller: Administrator) -> list[WebhookRow]:
    """Lists the webhooks, and how many messages they have got."""
    delivered, waiting = func.count(Delivery.delivered), func.count(Delivery.due)
    query = select(Webhook, delivered, waiting, func.count(Delivery.id), func.max(Delivery.problem))
    with reading(service.engine) as session:
        rows = session.execute(query.join(Delivery, isouter=True).group_by(Webhook.id)).all()
    return [
        WebhookRow(
            id=one.id,
            url=public_text(one.url),
            made_by=one.made_by,
            made=one.made,
            delivered=taken,
            waiting=due,
            given_up=total - taken - due,
            problem=problem or "",
        )
        for one, taken, due, total, problem in rows
    ]


@router.post("/api/webhooks", status_code=201)
def add_webhook(service: Shared, caller: Administrator, body: NewWebhook) -> WebhookMade:
    """Adds a webhook. It is told of runs that end from now on."""
    if problem := problem_of(body.url):
        raise unfit(problem, "url")
    secret = new_secret()
    with writing(service.engine) as session:
        if (session.scalar(select(func.count(Webhook.id))) or 0) >= _MOST:
            raise unfit(f"there are {_MOST} webhooks already", "url")
        webhook = Webhook(url=body.url, secret=secret, made_by=caller.name, made=time.time())
        session.add(webhook)
        session.flush()
        record(session, caller, "webhook.add", str(webhook.id), {"url": body.url})
        return WebhookMade(id=webhook.id, secret=secret)


@router.delete("/api/webhooks/{webhook_id}", status_code=204)
def remove_webhook(service: Shared, caller: Administrator, webhook_id: Id) -> None:
    """Removes a webhook, and the messages that wait for it."""
    with writing(service.engine) as session:
        webhook = session.get(Webhook, webhook_id)
        if webhook is None:
            raise not_found("there is no such webhook")
        session.delete(webhook)
        record(session, caller, "webhook.remove", str(webhook_id), {"url": webhook.url})
