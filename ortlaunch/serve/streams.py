"""The event streams of all browsers: which topics there are, who may go on listening, and what the index finds."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import anyio
from fastapi import HTTPException
from sqlalchemy import func, select
from sqlalchemy.exc import SQLAlchemyError

from ortlaunch.serve.access import Caller, those_allowed
from ortlaunch.serve.api.shapes import Row
from ortlaunch.serve.channels import FileChannel, ListChannel
from ortlaunch.serve.clients import Client, EventStream
from ortlaunch.serve.database import reading
from ortlaunch.serve.follow.logs import log_file
from ortlaunch.serve.index.finding import Found, find
from ortlaunch.serve.index.indexer import Change
from ortlaunch.serve.index.listing import rows_of
from ortlaunch.serve.limits import TooManyRequests
from ortlaunch.serve.queue.tables import OPEN_STATES, Job
from ortlaunch.serve.readers import Readers
from ortlaunch.serve.rounds import Rounds
from ortlaunch.serve.service import Service
from ortlaunch.serve.tails import JournalTail, LogTail, Tail
from ortlaunch.serve.unfit import Unfit, unfit

_LOG = logging.getLogger(__name__)
MOST_TOPICS = 128
"""Topics of one stream: a run's page has two, and a browser has one stream for all its tabs."""
MOST_STREAMS = 12
"""Streams of one user. A browser needs one, whatever the number of its tabs."""
_ASK_SECONDS = 2.0
"""How often it is asked whether those who listen still may: a token that was revoked is to end within five."""
_NEWEST_JOBS = 100
"""So many of the latest jobs are looked at though they may be over."""
_MOST_ROWS = 200
"""A change of more rows makes browsers load the list again."""
_TOPIC = re.compile(
    r"(?P<topic>list|run:[\w-]{1,64}|log:[\w-]{1,64}:[\w-]{1,64})(?:@(?P<position>[\w.]{1,40}))?", re.ASCII
)


def make_streams(service: Service) -> Streams:
    """Returns the event streams of a service."""
    return Streams(service)


class Streams:
    """All event streams. What is not said otherwise is called in the event loop."""

    def __init__(self, service: Service, most_of_a_user: int = MOST_STREAMS) -> None:
        self._service = service
        self._most = most_of_a_user
        self._list = ListChannel()
        self._files: dict[str, FileChannel] = {}
        self._clients: set[Client] = set()
        self._rounds = Rounds(lambda: len(self._clients))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._readers = Readers()
        self._watcher: asyncio.Task[None] | None = None
        self._jobs: dict[str, tuple[object, ...]] = {}
        """The open jobs as they were told last, by their run folders; for the index's thread."""
        self._stopped = threading.Event()
        if service.runs is not None:
            service.runs.listen(self._take_change)

    @property
    def counts(self) -> tuple[int, int]:
        """How many streams there are, and how many files are followed."""
        return len(self._clients), len(self._files)

    def start(self) -> None:
        """Begins; the tasks start with the first stream. It is called in a thread."""
        self._stopped.clear()

    def stop(self) -> None:
        """Ends all streams. It is called in a thread."""
        self._stopped.set()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end_all)

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
        tails = self._tails(wanted)

        async def run(client: Client) -> None:
            async with anyio.create_task_group() as tasks:
                for topic, tail in tails.items():
                    tasks.start_soon(self._follow_file, topic, tail, client, positions[topic])
                if ListChannel.topic in positions:
                    tasks.start_soon(self._list.follow, client, positions[ListChannel.topic])

        return EventStream(lambda: self._new_client(caller), run, self._forget)

    async def _follow_file(self, topic: str, found: tuple[str, Tail], client: Client, position: str | None) -> None:
        key, tail = found
        place = key.partition(" ")[2]
        at = int(position) if position is not None and position.isdecimal() and len(position) < 16 else None
        # Nothing is awaited from here until `follow` has begun: the channel could be closed as idle meanwhile.
        channel = self._files.get(key)
        if channel is None:
            channel = self._files[key] = FileChannel(tail, partial(self._readers.call, place))
        # After it has joined: a change that comes while a client catches up is told to those who have.
        joined = partial(self._say_row, client, channel, place) if tail.event == "run" else None
        await channel.follow(client, topic, at, joined)

    async def _say_row(self, client: Client, channel: FileChannel, place: str) -> None:
        """Sends the row of a run as it is now, which a browser may have missed a change of."""
        if channel.told is None:
            rows = await anyio.to_thread.run_sync(self._rows, [place])
            # What was told meanwhile is newer.
            channel.told = channel.told or next(map(_as_told, rows.values()), None)
        if channel.told is not None:
            client.say("run", channel.told)

    def _new_client(self, caller: Caller) -> Client:
        if sum(client.caller.user_id == caller.user_id for client in self._clients) >= self._most:
            raise TooManyRequests(10.0)
        client = Client(caller, self._rounds)
        self._clients.add(client)
        self._loop = asyncio.get_running_loop()
        if self._watcher is None or self._watcher.done():
            self._watcher = self._loop.create_task(self._watch())
        return client

    def _forget(self, client: Client) -> None:
        self._clients.discard(client)

    async def _watch(self) -> None:
        """Ends the streams of those who may not listen any more, and the tasks of files that nobody follows.

        It also keeps quiet streams alive.
        """
        while self._clients or self._files:
            await anyio.sleep(_ASK_SECONDS)
            for client in self._clients:
                client.keep_alive()
            asked = {client.caller for client in self._clients}
            may = await anyio.to_thread.run_sync(self._who_may_listen, asked)
            for client in [one for one in self._clients if one.caller in asked and one.caller not in (may or ())]:
                # One that has been told and is still here reads nothing.
                if may is None or client.is_over:
                    client.cut()
                else:
                    client.end("you are logged out, or the token was revoked")
            for key in [key for key, channel in self._files.items() if channel.is_idle]:
                self._files.pop(key).close()

    def _who_may_listen(self, callers: set[Caller]) -> set[Caller] | None:
        """Those who may go on listening; None if it cannot be asked: the browsers then come back."""
        try:
            return those_allowed(self._service, callers)
        except SQLAlchemyError:
            _LOG.exception("it could not be asked who may listen to events")
            return None

    def _end_all(self) -> None:
        for channel in self._files.values():
            channel.close()
        self._files.clear()
        for client in list(self._clients):
            client.cut()
        if self._watcher is not None:
            self._watcher.cancel()

    def _tails(self, topics: Iterable[str]) -> dict[str, tuple[str, Tail]]:
        """The files of topics, as `_tail` finds them.

        A run or a log that is gone is left out: one tab that still shows it must not end the events of all others.
        """
        found: dict[str, tuple[str, Tail]] = {}
        refusals: list[Exception] = []
        wanted = list(topics)
        runs = _Runs(self._service)
        for topic in wanted:
            if topic == ListChannel.topic:
                continue
            try:
                found[topic] = self._tail(topic, runs)
            except (HTTPException, Unfit) as error:
                refusals.append(error)
        if len(refusals) == len(wanted):
            raise refusals[0]
        return found

    def _tail(self, topic: str, runs: _Runs) -> tuple[str, Tail]:
        """The file of a topic, and the key of its channel: several ids may mean one run."""
        kind, asked, *rest = topic.split(":")
        found = runs[asked]
        run = found.run
        if kind == "run":
            return f"run {found.place}", JournalTail(run, run.journal_file.relative_to(run.path), {"id": found.id})
        file = log_file(run, rest[0])
        if file is None:
            raise unfit(f"{rest[0]} is no name of a log", "topics")
        return f"log:{rest[0]} {found.place}", LogTail(run, file, {"id": found.id, "rank": rest[0]})

    def _take_change(self, change: Change) -> None:
        """Takes what the index has found. It is called in the index's thread after each look at the folders."""
        loop = self._loop
        if self._stopped.is_set():
            return
        jobs = self._jobs_now()
        moved = {place for place in jobs.keys() | self._jobs.keys() if jobs.get(place) != self._jobs.get(place)}
        places = change.places | moved
        if not places and not change.gone:
            return
        if loop is None or loop.is_closed():
            self._list.leave_out()
        elif not self._clients:
            loop.call_soon_threadsafe(self._pass_over)
        elif len(places) > _MOST_ROWS:
            followed = [place for place in places if f"run {place}" in self._files]
            loop.call_soon_threadsafe(self._publish, self._rows(followed), None)
        else:
            loop.call_soon_threadsafe(self._publish, self._rows(sorted(places)), list(change.gone))
        # It comes last: where the rows cannot be read now, the jobs that have moved are found again.
        self._jobs = jobs

    def _pass_over(self) -> None:
        """Notes a change that nobody is there for."""
        self._list.pass_over()
        for channel in self._files.values():
            channel.told = None

    def _publish(self, rows: Mapping[str, Row], gone: list[str] | None) -> None:
        """Tells a change of some rows; without `gone` there are more than these, and the list is loaded again."""
        self._list.publish(None if gone is None else {"rows": list(rows.values()), "gone": gone})
        for place, row in rows.items():
            if (channel := self._files.get(f"run {place}")) is not None:
                channel.tell(_as_told(row))

    def _jobs_now(self) -> dict[str, tuple[Any, ...]]:
        """What the rows show of the queue's open and newest jobs, by their run folders."""
        columns = (Job.run_dir, Job.id, Job.state, Job.reason, Job.priority)
        # Of a job that was submitted and taken back since the last call, both calls would see nothing otherwise.
        newest = select(func.max(Job.number) - _NEWEST_JOBS).scalar_subquery()
        looked_at = Job.state.in_(OPEN_STATES) | (Job.number > newest)
        with reading(self._service.engine) as session:
            found = session.execute(select(*columns).where(looked_at).order_by(Job.number)).all()
        positions = self._service.queue.positions()
        return {place: (job, *rest, positions.get(job)) for place, job, *rest in found}

    def _rows(self, places: list[str]) -> dict[str, Row]:
        with reading(self._service.engine) as session:
            return rows_of(session, self._service.queue.positions(), places)


class _Runs(dict[str, Found]):
    """The runs that the topics of one stream are about, each looked for once."""

    def __init__(self, service: Service) -> None:
        super().__init__()
        self._service = service

    def __missing__(self, asked: str) -> Found:
        found = self[asked] = find(self._service, asked)
        return found


def _as_told(row: Row) -> dict[str, Any]:
    """The event of a run that tells its row alone."""
    return {"id": row["id"], "row": row, "points": {}}


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
