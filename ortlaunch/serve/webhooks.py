"""Tells webhooks that runs have ended: signed, and again until somebody takes it.

The messages wait in the database, so that a restart loses none. One that was taken just before the service was killed
comes again with the same number. The signature is that of
``HMAC-SHA256(secret, TIMESTAMP + "." + BODY)``, as hexadecimal digits.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException, HTTPMessage
from typing import IO, NamedTuple
from urllib.parse import urlsplit

from sqlalchemy import Engine, delete, func, select
from sqlalchemy.exc import SQLAlchemyError

import ortlaunch
from ortlaunch.base.text import library_error, public_text
from ortlaunch.serve.database import reading, writing
from ortlaunch.serve.index.tables import Delivery, Webhook
from ortlaunch.serve.service import Service

_LOG = logging.getLogger(__name__)
_PASS_SECONDS = 2.0
_TIMEOUT = 10.0
_FIRST_SECONDS, _FACTOR, _MOST_SECONDS = 5.0, 4.0, 6 * 3600.0
"""A message that was not taken comes again after these seconds, and after a failure later and later."""
MOST_TRIES = 12
"""The last one comes 32 hours after the first."""
_AT_ONCE = 20
"""Messages of one webhook that are looked at together."""
_KEPT_SECONDS = 30 * 86400.0


class _Due(NamedTuple):
    """A message to send."""

    number: int
    webhook: int
    url: str
    secret: str
    body: str
    tries: int


class Webhooks:
    """The thread that sends messages."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._answers: dict[int, str] = {}
        """What `deliver` has said of messages by their numbers, until the database has it."""
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread."""
        self._stopping.clear()
        self._thread = threading.Thread(target=self._work, name="webhooks", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; what was not delivered waits for the next start."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=2)

    def send_due(self, now: float | None = None) -> int:
        """Sends what is due; returns how many messages were tried.

        Args:
            now: the time; None for the present.
        """
        moment = time.time() if now is None else now
        tried, silent = 0, set[int]()
        for one in list(self._due(moment)):
            if self._stopping.is_set():
                break
            # Each failure may take its ten seconds, for which all others wait.
            if one.webhook in silent:
                continue
            # While the disk is full nothing can be noted, and the same message would be sent every two seconds.
            if one.number not in self._answers:
                self._answers[one.number] = deliver(one.url, one.secret, one.number, one.body)
            self._note(one, self._answers[one.number], moment)
            if self._answers.pop(one.number):
                silent.add(one.webhook)
            tried += 1
        return tried

    def _work(self) -> None:
        cleaned = 0.0
        while not self._stopping.is_set():
            try:
                if time.monotonic() - cleaned > 3600:
                    self._forget_old()
                    cleaned = time.monotonic()
                if self.send_due():
                    continue
            except SQLAlchemyError:
                _LOG.exception("webhooks could not be called, and are called later")
            self._stopping.wait(_PASS_SECONDS)

    def _due(self, now: float) -> Iterator[_Due]:
        turn = func.row_number().over(partition_by=Delivery.webhook_id, order_by=Delivery.due).label("turn")
        turns = select(Delivery.id, turn).where(Delivery.due <= now).subquery()
        query = select(Delivery, Webhook).join(Webhook, Webhook.id == Delivery.webhook_id)
        query = query.join(turns, turns.c.id == Delivery.id).where(turns.c.turn <= _AT_ONCE)
        with reading(self._engine) as session:
            rows = session.execute(query.order_by(Delivery.due)).all()
        for message, webhook in rows:
            yield _Due(message.id, webhook.id, webhook.url, webhook.secret, message.body, message.tries)

    def _note(self, one: _Due, problem: str, now: float) -> None:
        with writing(self._engine) as session:
            message = session.get(Delivery, one.number)
            if message is None:
                return
            message.tries = one.tries + 1
            message.problem = problem
            if not problem:
                message.delivered, message.due = time.time(), None
            elif message.tries >= MOST_TRIES:
                message.due = None
            else:
                message.due = now + min(_MOST_SECONDS, _FIRST_SECONDS * _FACTOR**one.tries)

    def _forget_old(self) -> None:
        with writing(self._engine) as session:
            old = Delivery.ended < time.time() - _KEPT_SECONDS
            session.execute(delete(Delivery).where(old, Delivery.due.is_(None)))


def make_webhooks(service: Service) -> Webhooks:
    """Returns the sender of a service."""
    return Webhooks(service.engine)


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """Returns the signature of a message."""
    return hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


def deliver(url: str, secret: str, number: int, body: str) -> str:
    """Sends one message; returns why it was not taken, or an empty text.

    Args:
        url: the address.
        secret: the key of the signature.
        number: the number of the message, the same when it is sent again.
        body: the message as JSON.
    """
    timestamp, data = str(int(time.time())), body.encode()
    headers = {
        "Content-Type": "application/json",
        "User-Agent": f"ortlaunch/{ortlaunch.__version__}",
        "X-Ortlaunch-Delivery": str(number),
        "X-Ortlaunch-Timestamp": timestamp,
        "X-Ortlaunch-Signature": f"sha256={signature(secret, timestamp, data)}",
    }
    try:
        with _opener.open(urllib.request.Request(url, data, headers, method="POST"), timeout=_TIMEOUT):
            return ""
    except urllib.error.HTTPError as error:
        error.close()
        return f"it answered {error.code}"
    except (OSError, HTTPException, ValueError) as error:
        return public_text(library_error(error))[:300] or type(error).__name__


def problem_of(url: str) -> str:
    """Returns why an address cannot be a webhook's; empty if it can."""
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fits = False
    if not fits or not url.isascii() or not url.isprintable() or " " in url:
        return "a webhook is an address that begins with https:// or http://"
    if parts.username or parts.password:
        return "an address with a password would be shown: the message is signed instead"
    return ""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect counts as a failure: the message is for the address that an administrator has named."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        """Follows no redirect."""
        return


_opener = urllib.request.build_opener(_NoRedirect)
