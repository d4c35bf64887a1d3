"""The service behind a real uvicorn in a thread of this process, and event streams as a browser reads them."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from tests.support.service import InProcess
from tests.support.waiting import PATIENCE, until


@contextmanager
def listening(served: InProcess) -> Iterator[int]:
    """Runs the service on a free port of the loopback; yields the port."""
    config = uvicorn.Config(served.app, port=0, log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(120)
        assert not thread.is_alive()


@dataclass
class Message:
    """One event."""

    event: str
    id: str
    data: Any


@dataclass
class Stream:
    """An open event stream."""

    connection: http.client.HTTPConnection
    answer: http.client.HTTPResponse
    last: str = ""
    seen: list[Message] = field(default_factory=list)

    def until(self, event: str, *, count: int = 1, seconds: float = PATIENCE) -> list[Message]:
        """Reads until so many events of a kind have come; returns these."""
        found: list[Message] = []
        deadline = time.monotonic() + seconds
        while len(found) < count:
            assert time.monotonic() < deadline, f"no {event} among {self.seen}"
            message = self.read()
            if message.event == event:
                found.append(message)
        return found

    def read(self) -> Message:
        """Reads one event; an error if the stream has ended."""
        fields: dict[str, str] = {}
        while True:
            line = self.answer.readline().decode()
            if not line:
                raise EOFError
            if line == "\n" and "data" in fields:
                message = Message(fields["event"], fields.get("id", ""), json.loads(fields["data"]))
                self.last = message.id or self.last
                self.seen.append(message)
                return message
            name, _, value = line.rstrip("\n").partition(": ")
            if name:
                fields[name] = value

    def close(self) -> None:
        self.answer.close()
        self.connection.close()


def opened(port: int, headers: Mapping[str, str], topics: str, last: str = "") -> Stream:
    """Opens a stream; an error with the status if it is refused."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    sent = {**headers, **({"Last-Event-ID": last} if last else {})}
    connection.request("GET", f"/api/events?topics={topics}", headers=sent)
    answer = connection.getresponse()
    assert answer.status == 200, (answer.status, answer.read())
    return Stream(connection, answer, last)
