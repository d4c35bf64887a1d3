"""The answers of requests that the end of the service cuts off."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ortlaunch.serve.answers import problems

_ENDING = "the service is ending: send the request again when it is back"


class Leaving:
    """ASGI middleware. The server cancels requests that take long when it ends, and would print a traceback of each."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        has_begun = False

        async def noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except asyncio.CancelledError:
            if scope["type"] == "http" and not has_begun:
                await problems([(None, _ENDING)], 503, {"Retry-After": "5"})(scope, receive, send)
