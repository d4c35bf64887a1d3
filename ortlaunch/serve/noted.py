"""What people were refused, and which files they have fetched, for the audit."""

from __future__ import annotations

import re
from contextlib import suppress
from http import HTTPStatus

import anyio
from sqlalchemy.exc import OperationalError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ortlaunch.serve.access import Caller
from ortlaunch.serve.audit import record
from ortlaunch.serve.database import writing
from ortlaunch.serve.limits import TooManyRequests
from ortlaunch.serve.service import Service

_FILE = re.compile(r"/api/runs/[^/]+/files/.+")


class Noted:
    """ASGI middleware. It writes before the answer goes out, and so much of one person at most (`limits.NOTED`)."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def noted(message: Message) -> None:
            caller = scope.get("state", {}).get("caller")
            if message["type"] == "http.response.start" and isinstance(caller, Caller):
                action = _action(scope, message["status"])
                if action is not None:
                    await anyio.to_thread.run_sync(self._note, caller, action, f"{scope['method']} {scope['path']}")
            await send(message)

        await self._app(scope, receive, noted)

    def _note(self, caller: Caller, action: str, target: str) -> None:
        try:
            # Somebody who is refused may go on trying, and would fill the disk.
            self._service.limits.noted.take(str(caller.user_id))
        except TooManyRequests:
            return
        # A database that cannot be written keeps nobody from their files.
        with suppress(OperationalError), writing(self._service.engine) as session:
            record(session, caller, action, target)


def _action(scope: Scope, status: int) -> str | None:
    if status == HTTPStatus.FORBIDDEN:
        return "refused"
    is_file = status < HTTPStatus.BAD_REQUEST and _FILE.fullmatch(scope["path"]) is not None
    return "run.download" if is_file else None
