"""Topics of event streams. Each event is made once, however many browsers follow the topic."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from ortlaunch.serve.clients import Client, encoded
from ortlaunch.serve.rounds import FAST_SECONDS, SLOW_SECONDS, pace, until_round
from ortlaunch.serve.tails import Piece, Tail

_LOG = logging.getLogger(__name__)
InThread = Callable[..., Awaitable[Any]]
_BEHIND_BYTES = 64 * 1024
"""So much that was not read yet is read at once, and less with the next look."""
_QUIET_SECONDS = 30.0
"""A file that has not grown for so long is looked at as seldom as one that many follow."""
_FAILED_SECONDS = 5.0
"""The pause after a look at a file has failed."""
_LINGER_SECONDS = 5.0
"""How long a file is followed after the last browser has left: the same one may be coming back."""
_KEPT_EVENTS = 500
"""Changes of the list that are kept for browsers that come back."""
_FRESH_SECONDS = 10.0
"""A page that was made so long ago may lack changes from before its stream began."""


class FileChannel:
    """One file, read by one task for all who follow it."""

    def __init__(self, tail: Tail, in_thread: InThread) -> None:
        """
        Args:
            tail: the file.
            in_thread: calls a function that reads the file, with what it takes.
        """
        self.left_at = time.monotonic()
        """When the last browser left."""
        self._tail = tail
        self._in_thread = in_thread
        self._position = 0
        """All who follow have got the file up to here."""
        self._piece = Piece(None, 0, None)
        """The latest look at the file."""
        self._grown_at = time.monotonic()
        """When the file was seen to grow last."""
        self._turn = 0
        """Counts the files that took each other's place."""
        self._inside = 0
        """How many are in `follow`, also those who do not have everything up to the position yet."""
        self._followers: dict[Client, str] = {}
        """The topic under which each one follows it: several ids mean one run."""
        self.told: dict[str, Any] | None = None
        """What was told last, for those who come later; None if it may be old."""
        self._task: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nobody has followed the file for some time."""
        return not self._inside and time.monotonic() - self.left_at > _LINGER_SECONDS

    @property
    def followers(self) -> int:
        """How many browsers follow it."""
        return len(self._followers)

    async def follow(
        self,
        client: Client,
        topic: str,
        position: int | None,
        joined: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Sends a client what comes after a position, and then everything new, until it is cancelled.

        Args:
            client: the client.
            topic: what the client calls the file.
            position: where it was; None for the file's present end.
            joined: is called once the client gets everything that is told.
        """
        # Whoever is still on the way here counts too: a channel that is closed meanwhile would stay silent for ever.
        self._inside += 1
        try:
            position = await self._begin(position)
            client.positions.setdefault(topic, str(position))
            await self._catch_up(client, topic, position)
            # Nothing was awaited since the client was where the channel is, so no event lies between.
            self._followers[client] = topic
            if joined is not None:
                await joined()
            await asyncio.get_running_loop().create_future()
        finally:
            self._inside -= 1
            self._followers.pop(client, None)
            self.left_at = time.monotonic()

    def tell(self, content: dict[str, Any]) -> None:
        """Sends all who follow an event that does not move the position."""
        self.told = content
        if self._followers:
            where = {"offset": self._position, "next": self._position}
            self._send(encoded(self._tail.event, content | where), is_patient=True)

    def close(self) -> None:
        """Ends its task."""
        if self._task is not None:
            self._task.cancel()

    async def _begin(self, position: int | None) -> int:
        """Starts the task, at the end of the file, unless it works already; returns where a client begins.

        One who begins far before the end would otherwise keep all others waiting for what they have long had.
        """
        if position is not None and self._is_working:
            return position
        end: int = await self._in_thread(self._tail.end)
        if not self._is_working:
            self._position = end
            self._task = asyncio.get_running_loop().create_task(self._work())
        return end if position is None else position

    @property
    def _is_working(self) -> bool:
        return self._task is not None and not self._task.done()

    async def _catch_up(self, client: Client, topic: str, at: int) -> None:
        """Sends one client what lies between its position and the channel's. It is read for this client alone."""
        turn = self._turn
        while at != self._position:
            if turn != self._turn or (at > self._position and await self._is_beyond(at)):
                turn, at = self._turn, 0
                client.push(encoded("reset", {"topic": topic}), topic, "0")
            # A client may be ahead too: its page was read after the channel's last look at the file.
            elif at > self._position or not client.is_free:
                await anyio.sleep(FAST_SECONDS)
            else:
                piece = await self._read(at, until=self._position)
                if piece.next == at:
                    await anyio.sleep(FAST_SECONDS)
                at = piece.next
                if piece.content is not None:
                    client.push(encoded(self._tail.event, piece.content), topic, str(at))

    async def _is_beyond(self, at: int) -> bool:
        """Whether a position is not in the file, which then is another than the client knows."""
        piece = await self._read(at, until=at)
        return piece.file is not None and piece.size < at

    async def _work(self) -> None:
        self._grown_at = time.monotonic()
        is_failing = False
        while True:
            try:
                if await self._look():
                    continue
                is_failing = False
            except Exception:
                # Those who follow would get nothing more, and would not know it.
                if not is_failing:
                    _LOG.exception("a file of a run cannot be followed")
                is_failing = True
            await anyio.sleep(_FAILED_SECONDS if is_failing else self._pause())

    def _pause(self) -> float:
        """Seconds until the next look. Files of one pace are looked at together: one sending takes what is new."""
        is_growing = time.monotonic() - self._grown_at < _QUIET_SECONDS
        return until_round(pace(len(self._followers)) if is_growing else SLOW_SECONDS)

    async def _look(self) -> bool:
        """Looks at the file once, and sends what is new; returns whether there is much more to read."""
        piece = await self._read(self._position)
        if piece.file is not None and self._is_another(piece):
            self._turn, self._position, self._piece = self._turn + 1, 0, piece
            for client, topic in list(self._followers.items()):
                client.push(encoded("reset", {"topic": topic}), topic, "0")
            return True
        self._piece = piece
        if piece.next == self._position:
            return False
        self._position, self._grown_at = piece.next, time.monotonic()
        if piece.content is not None and self._followers:
            self._send(encoded(self._tail.event, piece.content))
        # Not at each growth: while lines come all the time, each would become an event of its own.
        return piece.size - piece.next >= _BEHIND_BYTES

    def _is_another(self, piece: Piece) -> bool:
        """Whether the file that is there is not the one that was read."""
        return self._piece.file not in (None, piece.file) or piece.size < self._position

    def _send(self, event: bytes, *, is_patient: bool = False) -> None:
        for client, topic in list(self._followers.items()):
            client.push(event, topic, str(self._position), is_patient=is_patient)

    async def _read(self, at: int, until: int | None = None) -> Piece:
        piece: Piece = await self._in_thread(self._tail.read, at, until)
        return piece


class ListChannel:
    """Changes of the list of runs. Its position is a number, which another start of the service does not know."""

    topic = "list"

    def __init__(self) -> None:
        self._epoch = secrets.token_hex(3)
        self._number = 0
        self._kept: deque[tuple[int, float, bytes]] = deque(maxlen=_KEPT_EVENTS)
        self._followers: set[Client] = set()
        self._unsent_at = -_FRESH_SECONDS
        """When there was a change that cannot be given to those who come later."""

    @property
    def followers(self) -> int:
        """How many browsers follow it."""
        return len(self._followers)

    def publish(self, content: dict[str, Any] | None) -> None:
        """Sends a change to all who follow; None means that the whole list has to be loaded again."""
        self._number += 1
        if content is None:
            self.leave_out()
            self._kept.clear()
            event = encoded("reload", {"topic": self.topic})
        else:
            event = encoded(self.topic, content)
            self._kept.append((self._number, time.monotonic(), event))
        for client in list(self._followers):
            client.push(event, self.topic, self._position(self._number), is_patient=True)

    def pass_over(self) -> None:
        """Counts a change that nobody was there for, so that it was not made into an event."""
        if self._followers:
            # Somebody has come since, perhaps with a page from before the change.
            self.publish(None)
            return
        self.leave_out()
        self._number += 1
        self._kept.clear()

    def leave_out(self) -> None:
        """Notes a change that is not kept, before there was any stream. It may be called in any thread."""
        self._unsent_at = time.monotonic()

    async def follow(self, client: Client, position: str | None) -> None:
        """Sends a client the changes after a position, or of the last seconds, and then the new ones.

        Args:
            client: the client.
            position: where it was; None for one that has just loaded the list.
        """
        for number, event in self._missed(position):
            client.push(event, self.topic, self._position(number))
        client.positions[self.topic] = self._position(self._number)
        self._followers.add(client)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self._followers.discard(client)

    def _missed(self, position: str | None) -> list[tuple[int, bytes]]:
        if position is None:
            since = time.monotonic() - _FRESH_SECONDS
            recent = [(number, event) for number, at, event in self._kept if at > since]
            # The page may have been made before it. A browser loads the list alone, and its stream goes on: once.
            return [self._reload(), *recent] if self._unsent_at > since else recent
        epoch, _, text = position.partition(".")
        number = int(text) if text.isdecimal() and len(text) < 16 else -1
        first = self._kept[0][0] if self._kept else self._number + 1
        if epoch != self._epoch or not first - 1 <= number <= self._number:
            return [self._reload()]
        return [(one, event) for one, _, event in self._kept if one > number]

    def _reload(self) -> tuple[int, bytes]:
        return self._number, encoded("reload", {"topic": self.topic})

    def _position(self, number: int) -> str:
        return f"{self._epoch}.{number}"
