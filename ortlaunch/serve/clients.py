"""One event stream: what is to be sent to one browser, and the answer that sends it."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ortlaunch.serve.access import Caller
from ortlaunch.serve.rounds import Rounds

MOST_WAITING = 1 << 20
"""A stream that is this many bytes behind is cut off. The browser comes back with the id of the last event it got."""
_SOON = 64 * 1024
"""So many bytes are sent at once."""
_QUIET_SECONDS = 15.0
"""After so long without an event a comment is sent, so that neither a proxy nor we keep what is dead."""
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""nginx would collect events before it passes them on."""


class Client:
    """One browser's stream. All methods are called in the event loop."""

    def __init__(self, caller: Caller, rounds: Rounds) -> None:
        """
        Args:
            caller: who listens.
            rounds: when streams send.
        """
        self.caller = caller
        self._rounds = rounds
        self.positions: dict[str, str] = {}
        """How far each topic was sent; together they are the id of the next event."""
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._sent_at = time.monotonic()
        self._wake = asyncio.Event()
        self._scope: anyio.CancelScope | None = None
        self.is_over = False

    @property
    def is_free(self) -> bool:
        """Whether it has little to send, so that what it missed can be read for it."""
        return self._size < MOST_WAITING // 4

    def push(self, event: bytes, topic: str, position: str, *, is_patient: bool = False) -> None:
        """Sends an event that all followers of a topic get.

        Args:
            event: the event without its id, from `encoded`.
            topic: the topic.
            position: the topic's position after the event.
            is_patient: whether it can wait for other events, to be sent with them; see `Rounds`.
        """
        if self.is_over:
            return
        self.positions[topic] = position
        last = ",".join(f"{name}@{at}" for name, at in self.positions.items())
        self._append(b"%bid: %b\n\n" % (event, last.encode()), is_patient)
        if self._size > MOST_WAITING:
            self.cut()

    def say(self, event: str, content: dict[str, Any]) -> None:
        """Sends an event to this browser alone; it changes no position."""
        self._append(encoded(event, content) + b"\n")

    def end(self, reason: str) -> None:
        """Says why the stream ends for good, and ends it."""
        self.say("bye", {"reason": reason})
        self.is_over = True

    def keep_alive(self) -> None:
        """Sends a comment if nothing was sent for some time."""
        if not self._waiting and time.monotonic() - self._sent_at > _QUIET_SECONDS:
            self._append(b":\n\n")

    def cut(self) -> None:
        """Ends the stream at once, without the rest of what it waits for."""
        self.is_over = True
        if self._scope is not None:
            self._scope.cancel()

    async def serve(self, send: Send, scope: anyio.CancelScope) -> None:
        """Sends what comes, until the stream is over."""
        self._scope = scope
        await send({"type": "http.response.body", "body": b"retry: 2000\n\n", "more_body": True})
        while not self.is_over or self._waiting:
            await self._wake.wait()
            self._wake.clear()
            if not self._waiting:
                # It was much, and has been sent before the others.
                continue
            data = b"".join(self._waiting)
            self._waiting.clear()
            # What is being sent still counts: a browser that reads nothing stops here.
            await send({"type": "http.response.body", "body": data, "more_body": True})
            self._sent_at = time.monotonic()
            self._size = sum(map(len, self._waiting))

    def _append(self, data: bytes, is_patient: bool = False) -> None:
        if self.is_over:
            return
        self._waiting.append(data)
        self._size += len(data)
        if self._size >= _SOON:
            self._wake.set()
        else:
            self._rounds.wake(self._wake, is_patient=is_patient)


def encoded(event: str, content: dict[str, Any]) -> bytes:
    """Returns an event without its id and without the blank line that ends it."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"event: {event}\ndata: {text}\n".encode(errors="replace")


class EventStream(Response):
    """The answer that is a stream of events, until the browser leaves or the stream is ended."""

    media_type = "text/event-stream"

    def __init__(
        self,
        enter: Callable[[], Client],
        run: Callable[[Client], Coroutine[Any, Any, None]],
        leave: Callable[[Client], None],
    ) -> None:
        """
        Args:
            enter: makes the client.
            run: serves its topics until it is cancelled.
            leave: forgets the client.
        """
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._enter = enter
        self._run = run
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the stream."""
        client = self._enter()
        try:
            await self._serve(client, receive, send)
        finally:
            self._leave(client)

    async def _serve(self, client: Client, receive: Receive, send: Send) -> None:
        start: Message = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        is_complete = False
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_until_gone, receive, tasks.cancel_scope)
            tasks.start_soon(self._run, client)
            await client.serve(send, tasks.cancel_scope)
            is_complete = True
            tasks.cancel_scope.cancel()
        if is_complete:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
