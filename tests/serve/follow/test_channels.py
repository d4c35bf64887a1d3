"""Channels of files and of the list, over a file that the test makes slow or broken."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from sqlalchemy import event
from starlette.types import Message

from ortlaunch.base.text import public_text
from ortlaunch.run.run import Run
from ortlaunch.serve import channels, clients, rounds
from ortlaunch.serve.access import Caller, Role, those_allowed
from ortlaunch.serve.api.shapes import Row
from ortlaunch.serve.channels import FileChannel, ListChannel
from ortlaunch.serve.clients import Client, encoded
from ortlaunch.serve.follow import curves
from ortlaunch.serve.index.indexer import Change
from ortlaunch.serve.rounds import Rounds
from ortlaunch.serve.service import Service
from ortlaunch.serve.streams import Streams
from ortlaunch.serve.tails import JournalTail, Piece
from ortlaunch.serve.tokens import make_token, revoke_token
from tests.support.service import InProcess
from tests.support.waiting import PATIENCE

TOPIC = "log:00aa00:0"


@dataclass
class FakeTail:
    """A text as a file. What lies before its first end cannot be read, nor its end be told, while a gate is shut."""

    text: str = ""
    event: str = "log"
    old: int = 0
    gate: threading.Event = field(default_factory=threading.Event)
    end_gate: threading.Event = field(default_factory=threading.Event)
    failures: int = 0

    def read(self, position: int, until: int | None = None) -> Piece:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("a broken disk")
        if position < self.old and until != position:
            assert self.gate.wait(PATIENCE)
        found = self.text[position:until]
        told = {"text": found} if found else None
        return Piece(told, position + len(found), (1, 1), len(self.text))

    def end(self) -> int:
        assert self.end_gate.wait(PATIENCE)
        return len(self.text)


@pytest.fixture
def tail() -> FakeTail:
    tail = FakeTail("old\n", old=4)
    tail.gate.set()
    tail.end_gate.set()
    return tail


def client(rounds: Rounds | None = None) -> Client:
    return Client(Caller(1, "vera", Role.viewer, None), rounds or Rounds(lambda: 1))


def got(one: Client) -> str:
    return b"".join(one._waiting).decode()


async def until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(PATIENCE):
        while not holds():
            await anyio.sleep(0.01)


@asynccontextmanager
async def following(channel: FileChannel, one: Client, position: int | None) -> AsyncIterator[None]:
    task = asyncio.create_task(channel.follow(one, TOPIC, position))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def channel_of(tail: FakeTail) -> FileChannel:
    return FileChannel(tail, anyio.to_thread.run_sync)


def test_a_channel_is_not_idle_while_somebody_is_on_the_way_to_it(tail: FakeTail) -> None:
    async def main() -> None:
        channel = channel_of(tail)
        channel.left_at -= 60
        tail.end_gate.clear()
        async with following(channel, client(), None):
            await anyio.sleep(0.05)
            is_idle = channel.is_idle
            tail.end_gate.set()
            await until(lambda: channel.followers == 1)
        assert not is_idle
        assert not channel.is_idle
        channel.left_at -= 60
        assert channel.is_idle
        channel.close()

    asyncio.run(main())


@dataclass
class Rows:
    """Streams whose database has one row."""

    row: dict[str, Any]
    asked: int = 0

    def streams(self) -> Streams:
        made = Streams(cast(Service, SimpleNamespace(runs=None)))
        made._rows = self._found  # type: ignore[method-assign]
        return made

    def _found(self, places: list[str]) -> dict[str, Any]:
        self.asked += 1
        return dict.fromkeys(places, self.row)


def states(one: Client) -> list[str]:
    """The states that a client was told."""
    return re.findall(r'"state":"(\w+)"', got(one))


def test_a_row_that_changes_while_a_client_catches_up_is_told(tail: FakeTail) -> None:
    async def main() -> None:
        tail.event, rows = "run", Rows({"id": "00aa00", "state": "running"})
        streams = rows.streams()
        tail.gate.clear()
        late, key = client(), "run /place"
        task = asyncio.create_task(streams._follow_file("run:00aa00", (key, tail), late, "0"))
        await until(lambda: key in streams._files and streams._files[key]._position > 0)
        rows.row = {"id": "00aa00", "state": "finished"}
        streams._publish({"/place": cast(Row, rows.row)}, [])
        tail.gate.set()
        await until(lambda: bool(states(late)))
        assert states(late)[-1] == "finished"
        streams._end_all()
        task.cancel()

    asyncio.run(main())


def test_a_row_is_asked_for_once_for_all_and_again_after_nobody_was_there(tail: FakeTail) -> None:
    async def main() -> None:
        tail.event, rows = "run", Rows({"id": "00aa00", "state": "running"})
        streams, key = rows.streams(), "run /place"
        several = [client() for _ in range(5)]
        for one in several:
            task = asyncio.create_task(streams._follow_file("run:00aa00", (key, tail), one, None))
            await until(lambda one=one: bool(states(one)))
            task.cancel()
        assert rows.asked == 1
        assert [states(one) for one in several] == [["running"]] * 5
        streams._publish({"/place": cast(Row, {"id": "00aa00", "state": "stopping"})}, [])
        rows.row = {"id": "00aa00", "state": "finished"}
        for state, asked in (("stopping", 1), ("finished", 2)):
            late = client()
            task = asyncio.create_task(streams._follow_file("run:00aa00", (key, tail), late, None))
            await until(lambda late=late: bool(states(late)))
            assert (states(late), rows.asked) == ([state], asked)
            task.cancel()
            streams._pass_over()
        streams._end_all()

    asyncio.run(main())


def test_a_run_that_changes_among_very_many_is_told_to_those_who_follow_it(
    tail: FakeTail, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        tail.event, rows = "run", Rows({"id": "00aa00", "state": "running"})
        streams, one = rows.streams(), client()
        monkeypatch.setattr(streams, "_jobs_now", dict)
        streams._loop, streams._clients = asyncio.get_running_loop(), {one}
        task = asyncio.create_task(streams._follow_file("run:00aa00", ("run /place", tail), one, None))
        await until(lambda: bool(states(one)))
        rows.row = {"id": "00aa00", "state": "finished"}
        streams._take_change(Change(frozenset(["/place", *map(str, range(300))]), ()))
        await until(lambda: states(one) == ["running", "finished"])
        streams._end_all()
        task.cancel()

    asyncio.run(main())


def test_a_client_that_reads_nothing_leaves_its_place_when_it_may_not_listen_any_more(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ortlaunch.serve.streams._ASK_SECONDS", 0.01)

    async def receive() -> Message:
        return await asyncio.get_running_loop().create_future()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.get_running_loop().create_future()

    async def main() -> None:
        # There is no user with this number, as if it had been removed.
        answer = service.streams.open(client().caller, "list", "")
        with anyio.fail_after(PATIENCE):
            await answer({}, receive, send)
        assert service.streams.counts == (0, 0)

    asyncio.run(main())


def test_who_begins_at_the_first_byte_keeps_nobody_waiting(tail: FakeTail) -> None:
    async def main() -> None:
        channel = channel_of(tail)
        first, second = client(), client()
        tail.gate.clear()
        async with following(channel, first, 0), following(channel, second, 4):
            await anyio.sleep(0.05)
            tail.text += "new\n"
            try:
                await until(lambda: "new" in got(second))
            finally:
                tail.gate.set()
            await until(lambda: "new" in got(first))
        assert "old" not in got(second)
        assert got(first).index("old") < got(first).index("new")
        channel.close()

    asyncio.run(main())


def test_a_position_beyond_the_file_is_begun_again_for_that_client_alone(tail: FakeTail) -> None:
    async def main() -> None:
        channel = channel_of(tail)
        sound, lost = client(), client()
        async with following(channel, sound, 4), following(channel, lost, 10**12):
            await until(lambda: "old" in got(lost))
            assert got(lost).startswith("event: reset")
        assert got(sound) == ""
        channel.close()

    asyncio.run(main())


def test_a_look_that_fails_ends_no_channel(
    tail: FakeTail, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(channels, "_FAILED_SECONDS", 0.01, raising=False)

    async def main() -> None:
        channel = channel_of(tail)
        one = client()
        async with following(channel, one, None):
            await until(lambda: channel.followers == 1)
            tail.failures = 3
            await until(lambda: not tail.failures)
            tail.text += "new\n"
            await until(lambda: "new" in got(one))
        channel.close()

    asyncio.run(main())
    assert caplog.text.count("cannot be followed") == 1


def test_who_loads_the_list_before_a_change_that_nobody_heard_loads_it_again() -> None:
    missing: list[Callable[[ListChannel], Any]] = [ListChannel.pass_over, lambda one: one.publish(None)]
    for miss in missing:
        channel = ListChannel()
        assert channel._missed(None) == []
        miss(channel)
        channel.publish({"rows": [], "gone": ["one"]})
        (number, reload), (_, later) = channel._missed(None)
        assert b"reload" in reload and b"gone" in later
        # What comes back with the position of this event has missed nothing.
        assert channel._missed(channel._position(number)) == []
        channel._unsent_at -= 60
        assert len(channel._missed(None)) == 1


def test_a_change_before_the_first_stream_counts_too(service: Service) -> None:
    service.streams._take_change(Change(frozenset(), ()))
    assert service.streams._list._missed(None) == []
    service.streams._take_change(Change(frozenset({"/a/run"}), ()))
    assert b"reload" in service.streams._list._missed(None)[0][1]


def test_lines_that_come_all_the_time_are_sent_together(tail: FakeTail) -> None:
    """One event for each look, and a few looks a second, or each line would cost a system call for each browser."""

    class Growing(FakeTail):
        def read(self, position: int, until: int | None = None) -> Piece:
            self.text += "new\n"
            return super().read(position, until)

    async def main() -> None:
        growing = Growing("old\n", gate=tail.gate, end_gate=tail.end_gate)
        channel, one = channel_of(growing), client()
        async with following(channel, one, None):
            await until(lambda: "event: log" in got(one))
            began = asyncio.get_running_loop().time()
            await anyio.sleep(0.8)
            looks = (asyncio.get_running_loop().time() - began) / rounds.FAST_SECONDS
        channel.close()
        assert got(one).count("event: log") <= 2 * looks + 2

    asyncio.run(main())


def test_what_is_much_is_read_at_once(tail: FakeTail, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that has left much unread is followed by the next one without a pause."""

    class Short(FakeTail):
        def read(self, position: int, until: int | None = None) -> Piece:
            return super().read(position, min(until or 10**9, position + 1000))

    monkeypatch.setattr(rounds, "FAST_SECONDS", 1.0)

    async def main() -> None:
        short = Short("", gate=tail.gate, end_gate=tail.end_gate)
        channel, one = channel_of(short), client()
        async with following(channel, one, None):
            await until(lambda: channel.followers == 1)
            short.text += "n" * 200_000
            await until(lambda: got(one).count("event: log") > 100)
        channel.close()

    asyncio.run(main())


def test_events_that_come_together_are_sent_at_once() -> None:
    sent: list[bytes] = []

    async def send(message: Message) -> None:
        sent.append(message["body"])

    async def main() -> None:
        one = client()
        with anyio.CancelScope() as scope:
            task = asyncio.create_task(one.serve(send, scope))
            await until(lambda: len(sent) == 1)
            one.say("first", {})
            await anyio.sleep(0)
            one.say("second", {})
            await until(lambda: len(sent) > 1)
            task.cancel()
        assert b"first" in sent[1] and b"second" in sent[1]

    asyncio.run(main())


def test_changes_of_rows_wait_for_lines_and_are_sent_with_them() -> None:
    sent: dict[int, list[bytes]] = {0: [], 1: []}

    def sender(number: int) -> Callable[[Message], Awaitable[None]]:
        async def send(message: Message) -> None:
            sent[number].append(message["body"])

        return send

    async def main() -> None:
        of_all = Rounds(lambda: 100)
        ones = [client(of_all) for _ in sent]
        with anyio.CancelScope() as scope:
            tasks = [asyncio.create_task(one.serve(sender(number), scope)) for number, one in enumerate(ones)]
            await until(lambda: all(map(len, sent.values())))
            for one in ones:
                one.push(encoded("list", {}), "list", "1", is_patient=True)
            await anyio.sleep(0.1)
            assert all(len(one) == 1 for one in sent.values())
            for one in ones:
                one.push(encoded("log", {}), TOPIC, "1")
            await until(lambda: all(len(one) == 2 for one in sent.values()))
            assert all(one[1].count(b"event: ") == 2 for one in sent.values())
            # Without lines they are sent by themselves.
            ones[0].push(encoded("list", {}), "list", "2", is_patient=True)
            await until(lambda: len(sent[0]) == 3)
            for task in tasks:
                task.cancel()

    asyncio.run(main())


def test_lines_do_not_wait_as_long_as_changes_of_rows() -> None:
    async def main() -> None:
        of_all, stream = Rounds(lambda: 100), asyncio.Event()
        of_all.wake(stream, is_patient=True)
        assert of_all._timer is not None
        late = of_all._timer
        of_all.wake(stream, is_patient=False)
        assert late.cancelled() and of_all._timer.when() < late.when() - 0.3
        soon = of_all._timer
        of_all.wake(stream, is_patient=True)
        assert of_all._timer is soon
        await stream.wait()

    asyncio.run(main())


def test_what_is_much_waits_for_no_round() -> None:
    sent: list[bytes] = []
    waiting: list[asyncio.Event] = []

    async def send(message: Message) -> None:
        sent.append(message["body"])

    async def main() -> None:
        one = client(cast(Rounds, SimpleNamespace(wake=lambda stream, is_patient: waiting.append(stream))))
        with anyio.CancelScope() as scope:
            task = asyncio.create_task(one.serve(send, scope))
            await until(lambda: len(sent) == 1)
            one.say("log", {"text": "little"})
            await anyio.sleep(0.05)
            assert len(sent) == 1
            one.say("log", {"text": "x" * 100_000})
            await until(lambda: len(sent) == 2)
            # The round comes after all, and finds nothing.
            waiting[0].set()
            await anyio.sleep(0.05)
            assert len(sent) == 2
            task.cancel()

    asyncio.run(main())


def test_a_quiet_stream_gets_a_comment(monkeypatch: pytest.MonkeyPatch) -> None:
    one = client()

    async def main() -> None:
        one.keep_alive()
        assert got(one) == ""
        monkeypatch.setattr(clients, "_QUIET_SECONDS", 0.0)
        one.keep_alive()
        one.keep_alive()
        assert got(one) == ":\n\n"

    asyncio.run(main())


def test_the_names_of_metrics_are_looked_at_once_for_all_their_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    names = ("train/loss", "token=abcdefgh1", "token=abcdefgh2")
    with run.journal() as journal:
        for step in range(100):
            journal.metrics(step, {name: float(number) for number, name in enumerate(names)})
    looked: list[str] = []
    monkeypatch.setattr(curves, "public_text", lambda name: looked.append(name) or public_text(name))
    told = JournalTail(run, Path("journal.jsonl"), {}).read(0).content
    assert told is not None
    assert sorted(looked) == sorted(names)
    # Two names that are shown as one keep the points of both.
    assert {name: len(points) for name, points in told["points"].items()} == {"train/loss": 100, "token=***": 200}


def test_all_who_listen_are_asked_about_together(served: InProcess) -> None:
    service = served.service
    people = []
    for number in range(10):
        person = served.person(f"person-{number}", Role.viewer)
        token, _ = make_token(service, person, "t", Role.viewer, 1)
        people.append(replace(person, token_id=token.id))
    gone = people[0]
    revoke_token(service, gone, gone.token_id or 0)
    asked: list[str] = []
    event.listen(service.engine, "before_cursor_execute", lambda *words: asked.append(words[2]))
    assert those_allowed(service, people) == set(people[1:])
    assert len([text for text in asked if text.startswith("SELECT")]) <= 4


def test_who_comes_between_a_change_and_its_count_loads_the_list_again() -> None:
    async def main() -> None:
        channel, one = ListChannel(), client()
        task = asyncio.create_task(channel.follow(one, None))
        await until(lambda: channel.followers == 1)
        channel.pass_over()
        assert "event: reload" in got(one)
        task.cancel()

    asyncio.run(main())
