"""The event streams of browsers. Each one looks once a second at what its topics have after its own positions.

What several streams ask for at once is looked at and encoded once: a piece of a file from one offset on, the rows that
have changed after one number, and who may still listen.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import anyio
from fastapi import HTTPException
from sqlalchemy.exc import SQLAlchemyError
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ortlaunch.serve.access import Caller, those_allowed
from ortlaunch.serve.changes import Changes
from ortlaunch.serve.follow.logs import log_file
from ortlaunch.serve.index.finding import Found, find
from ortlaunch.serve.index.listing import rows_of
from ortlaunch.serve.limits import TooManyRequests
from ortlaunch.serve.service import Service
from ortlaunch.serve.tails import FileTail, JournalTail, LogTail, Piece
from ortlaunch.serve.unfit import Unfit, unfit

_LOG = logging.getLogger(__name__)
MOST_TOPICS = 128
"""Topics of one stream: a run's page has two."""
MOST_STREAMS = 12
"""Streams of one user. Each page that is seen has one."""
_SECONDS = 1.0
_HANGING_SECONDS = 0.25
"""A stream waits so long for what its topics have; what takes longer, as below a root that hangs, comes later."""
_STUCK_SECONDS = 60.0
"""A stream ends whose browser has taken nothing for so long."""
_QUIET_SECONDS = 15.0
"""After so long without an event a comment is sent, so that neither a proxy nor we keep what is dead."""
_BEHIND_BYTES = 64 * 1024
"""So much that was not read yet is read at once, and less in the next second."""
_MOST_ROWS = 200
"""A change of more rows makes browsers load the list again."""
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""nginx would collect events before it passes them on."""
_LIST = "list"
_Look = Callable[..., Coroutine[Any, Any, Any]]
_TOPIC = re.compile(
    r"(?P<topic>list|run:[\w-]{1,64}|log:[\w-]{1,64}:[\w-]{1,64})(?:@(?P<position>[\w.]{1,40}))?", re.ASCII
)


class File:
    """A file that streams follow. In one second all of them read up to the same line, and are together from then on."""

    def __init__(self, place: str, tail: FileTail) -> None:
        """
        Args:
            place: the run folder.
            tail: reads the file.
        """
        self.place = place
        self.tail = tail
        self._turn = asyncio.Lock()
        self._second = 0
        self._until: int | None = None

    async def look(self, service: Service, second: int, at: int | None) -> tuple[Piece, bytes]:
        """Returns what the file has after a position, and the event of it; for None where its last whole line ends."""
        async with self._turn:
            if at is None:
                return Piece(None, await service.readers.call(self.place, self.tail.end), None), b""
            until = self._until if self._second == second else None
            if until is not None and at > until:
                return Piece(None, at, None), b""
            piece = await service.readers.call(self.place, self.tail.read, at, until)
            if until is None and piece.size - piece.next < _BEHIND_BYTES:
                self._second, self._until = second, piece.next
        return piece, b"" if piece.content is None else encoded(self.tail.event, piece.content)


@dataclass
class Followed:
    """One topic of one stream, and where the stream is in it."""

    topic: str
    file: File | None
    """None for the list."""
    at: int | None
    """The offset in the file, or the number of the latest change of the list."""
    identity: tuple[int, int] | None = None
    """Tells the file from another that took its place."""
    number: int = -1
    """The latest change that the row of a run was looked at for."""


class Streams:
    """All event streams. What is not said otherwise is called in the event loop."""

    def __init__(self, service: Service, most_of_a_user: int = MOST_STREAMS) -> None:
        self._service = service
        self._most = most_of_a_user
        self._changes = Changes(service)
        self._listening: Counter[Caller] = Counter()
        self._files: WeakValueDictionary[str, File] = WeakValueDictionary()
        self._looks: dict[tuple[Hashable, ...], asyncio.Task[Any]] = {}
        self._second = 0
        """When the looks began that all share. One that hangs is shared until it has ended."""
        self._failed_at = -_STUCK_SECONDS

    @property
    def count(self) -> int:
        """How many streams there are."""
        return self._listening.total()

    def open(self, caller: Caller, topics: str, last: str) -> EventStream:
        """Returns the answer that is a stream. It is called in a thread.

        Args:
            caller: who listens.
            topics: with commas between them, each with ``@`` and its position if it has one.
            last: the id of the last event that the browser got; its positions come before those of `topics`.

        Raises:
            Unfit: there are too many topics, or one cannot be read, or all are of logs that do not exist.
            HTTPException: all topics are of runs that do not exist.
        """
        wanted = parsed_topics(topics)
        if not 1 <= len(wanted) <= MOST_TOPICS:
            raise unfit(f"a stream has 1 to {MOST_TOPICS} topics", "topics")
        known = parsed_topics(last, is_strict=False)
        positions = {topic: known.get(topic) or position for topic, position in wanted.items()}
        return EventStream(self, caller, positions, self._tails(caller, wanted))

    def enter(self, caller: Caller) -> None:
        """Counts a stream.

        Raises:
            TooManyRequests: its user has too many.
        """
        if sum(count for one, count in self._listening.items() if one.user_id == caller.user_id) >= self._most:
            raise TooManyRequests(10.0)
        self._listening[caller] += 1

    def leave(self, caller: Caller) -> None:
        """Counts a stream no more."""
        self._listening[caller] -= 1
        self._listening += Counter()

    async def events(
        self, caller: Caller, positions: dict[str, str | None], tails: dict[str, tuple[str, FileTail]]
    ) -> AsyncIterator[bytes]:
        """Yields what a browser is sent, until it may not listen any more.

        Args:
            caller: who listens.
            positions: where the browser is in each topic.
            tails: the files of the topics, from `_tails`.
        """
        followed = [
            self._followed(topic, position, tails.get(topic))
            for topic, position in positions.items()
            if topic == _LIST or topic in tails
        ]
        sent_at = time.monotonic()
        yield b"retry: 2000\n\n"
        while True:
            refused = await self._result(("who",), self._refused)
            if refused is None:
                return
            if caller in refused:
                yield encoded("bye", {"reason": "you are logged out, or the token was revoked"}) + b"\n"
                return
            is_behind, events = await self._news(followed, caller.view)
            if events:
                sent_at = time.monotonic()
                yield b"".join(events)
            elif time.monotonic() - sent_at > _QUIET_SECONDS:
                sent_at = time.monotonic()
                yield b":\n\n"
            if not is_behind:
                await anyio.sleep(_SECONDS - time.monotonic() % _SECONDS)

    def _followed(self, topic: str, position: str | None, found: tuple[str, FileTail] | None) -> Followed:
        if found is None:
            return Followed(topic, None, self._changes.number_of(position))
        key, tail = found
        file = self._files.get(key)
        if file is None:
            file = self._files[key] = File(key.partition(" ")[2], tail)
        is_offset = position is not None and position.isdecimal() and len(position) < 16
        return Followed(topic, file, int(position) if position is not None and is_offset else None)

    async def _news(self, followed: list[Followed], view: frozenset[str] | None) -> tuple[bool, list[bytes]]:
        """Returns whether a file has much more, and the events of all topics, each with the position after it."""
        asked: list[tuple[Followed, asyncio.Task[Any]]] = []
        for one in followed:
            if one.file is None:
                asked.append((one, self._look((_LIST, one.at, view), self._list_change, one.at, view)))
                continue
            asked.append((one, self._look((one.file, one.at), self._file_piece, one.file, one.at)))
            if one.file.tail.event == "run" and self._changes.has_moved(one.file.place, one.number):
                asked.append((one, self._look(("row", one.file.place, view), self._row, one.file.place, view)))
        await asyncio.wait([look for _, look in asked], timeout=_HANGING_SECONDS)
        events: list[bytes] = []
        is_behind = False
        for one, look in asked:
            if not look.done() or (found := look.result()) is None:
                continue
            if one.file is None:
                one.at, event = found
            elif isinstance(found[0], Piece):
                event, has_more = _taken(one, *found)
                is_behind |= has_more
            else:
                one.number, event = found
            if event:
                last = ",".join(f"{each.topic}@{self._position(each)}" for each in followed if each.at is not None)
                events.append(b"%bid: %b\n\n" % (event, last.encode()))
        return is_behind, events

    def _position(self, one: Followed) -> str:
        return str(one.at) if one.file is not None or one.at is None else self._changes.position(one.at)

    def _look(self, key: tuple[Hashable, ...], look: _Look, *words: Any) -> asyncio.Task[Any]:
        """Looks at something, once in a second for all who ask for it. None is the result of a look that fails."""
        second = int(time.monotonic() / _SECONDS)
        if second != self._second:
            self._second = second
            self._looks = {key: task for key, task in self._looks.items() if not task.done()}
        task = self._looks.get(key)
        if task is None:
            task = self._looks[key] = asyncio.get_running_loop().create_task(self._tried(look, *words))
        return task

    async def _result(self, key: tuple[Hashable, ...], look: _Look, *words: Any) -> Any:
        task = self._look(key, look, *words)
        # Whoever leaves while it waits must not end the look for all others.
        await asyncio.wait([task])
        return task.result()

    async def _tried(self, look: _Look, *words: Any) -> Any:
        try:
            return await look(*words)
        except Exception:
            # Those who follow would get nothing more, and would not know it. It is told once in a while.
            if time.monotonic() - self._failed_at > _STUCK_SECONDS:
                self._failed_at = time.monotonic()
                _LOG.exception("what event streams follow cannot be looked at")
            return None

    async def _file_piece(self, file: File, at: int | None) -> tuple[Piece, bytes]:
        return await file.look(self._service, self._second, at)

    async def _list_change(self, number: int, view: frozenset[str] | None) -> tuple[int, bytes]:
        now, change = self._changes.after(number)
        if change is None or len(change.places) > _MOST_ROWS:
            return now, encoded("reload", {"topic": _LIST})
        if now == number:
            return now, b""
        rows = await anyio.to_thread.run_sync(self._rows, sorted(change.places), view)
        return now, encoded(_LIST, {"rows": rows, "gone": list(change.gone)})

    async def _row(self, place: str, view: frozenset[str] | None) -> tuple[int, bytes]:
        now = self._changes.number
        rows = await anyio.to_thread.run_sync(self._rows, [place], view)
        return now, b"".join(encoded("run", {"id": row["id"], "row": row, "points": {}}) for row in rows)

    def _rows(self, places: list[str], view: frozenset[str] | None) -> list[Any]:
        return list(rows_of(self._service, places, view).values())

    async def _refused(self) -> set[Caller] | None:
        """Those who may not listen any more; None if it cannot be asked: the browsers then come back."""
        asked = set(self._listening)
        try:
            return asked - await anyio.to_thread.run_sync(those_allowed, self._service, asked)
        except SQLAlchemyError:
            _LOG.exception("it could not be asked who may listen to events")
            return None

    def _tails(self, caller: Caller, topics: Iterable[str]) -> dict[str, tuple[str, FileTail]]:
        """The files of topics, as `_tail` finds them.

        A run or a log that is gone is left out: one that a page still shows must not end the events of all others.
        """
        found: dict[str, tuple[str, FileTail]] = {}
        refusals: list[Exception] = []
        wanted = list(topics)
        runs: dict[str, Found] = {}
        for topic in wanted:
            if topic == _LIST:
                continue
            _, asked, *rest = topic.split(":")
            try:
                runs[asked] = runs.get(asked) or find(self._service, caller, asked)
                found[topic] = _tail(runs[asked], *rest)
            except (HTTPException, Unfit) as error:
                refusals.append(error)
        if len(refusals) == len(wanted):
            raise refusals[0]
        return found


class EventStream(StreamingResponse):
    """The answer that is a stream of events, until the browser leaves, takes nothing, or may not listen any more."""

    media_type = "text/event-stream"

    def __init__(
        self,
        streams: Streams,
        caller: Caller,
        positions: dict[str, str | None],
        tails: dict[str, tuple[str, FileTail]],
    ) -> None:
        """
        Args:
            streams: all streams.
            caller: who listens.
            positions: where the browser is in each topic.
            tails: the files of the topics.
        """
        super().__init__(streams.events(caller, positions, tails), headers=_HEADERS)
        self._streams = streams
        self._caller = caller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the stream."""
        self._streams.enter(self._caller)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams.leave(self._caller)

    async def stream_response(self, send: Send) -> None:
        """Sends the events."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for events in self.body_iterator:
            with anyio.move_on_after(_STUCK_SECONDS) as patience:
                await send({"type": "http.response.body", "body": events, "more_body": True})
            if patience.cancelled_caught:
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def make_streams(service: Service) -> Streams:
    """Returns the event streams of a service."""
    return Streams(service)


def encoded(event: str, content: dict[str, Any]) -> bytes:
    """Returns an event without its id and without the blank line that ends it."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"event: {event}\ndata: {text}\n".encode(errors="replace")


def parsed_topics(text: str, *, is_strict: bool = True) -> dict[str, str | None]:
    """Returns topics with their positions.

    Args:
        text: topics as a browser names them, or the id of an event.
        is_strict: whether what cannot be read is refused, or left out.

    Raises:
        Unfit: something cannot be read.
    """
    found: dict[str, str | None] = {}
    for word in filter(None, text[:8192].split(",")):
        match = _TOPIC.fullmatch(word)
        if match is not None:
            found[match["topic"]] = match["position"]
        elif is_strict:
            raise unfit("topics are list, run:ID and log:ID:RANK, each with @POSITION if it has one", "topics")
    return found


def _taken(one: Followed, piece: Piece, event: bytes) -> tuple[bytes, bool]:
    """Moves a stream on behind a piece; returns the event, and whether there is much more."""
    is_other = one.identity not in (None, piece.file) or (one.at is not None and piece.size < one.at)
    if piece.file is not None and is_other:
        one.at, one.identity = 0, piece.file
        return encoded("reset", {"topic": one.topic}), True
    has_more = piece.next != one.at and piece.size - piece.next >= _BEHIND_BYTES
    one.at, one.identity = piece.next, piece.file or one.identity
    return event, has_more


def _tail(found: Found, rank: str = "") -> tuple[str, FileTail]:
    """The file of a topic, and what all who follow it call it: several ids may mean one run."""
    run, place = found.run, found.place
    if not rank:
        return f"run {place}", JournalTail(run, run.journal_file.relative_to(run.path), {"id": found.id})
    file = log_file(run, rank)
    if file is None:
        raise unfit(f"{rank} is no name of a log", "topics")
    return f"log:{rank} {place}", LogTail(run, file, {"id": found.id, "rank": rank})
