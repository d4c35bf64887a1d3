"""Connections whose requests never become whole, and what others get meanwhile."""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from ortlaunch.serve import connections
from tests.support.service import start
from tests.support.waiting import until

HEAD = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"
POST = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 10\r\n\r\n"


async def answers(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        pass
    await PlainTextResponse("whole")(scope, receive, send)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[int]:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.6)
    monkeypatch.setattr(connections, "BODY_SECONDS", 0.6)
    monkeypatch.setattr(connections, "MOST_OF_ADDRESS", 3)
    protocol = connections.protocol_for(getattr(request, "param", None))
    server = uvicorn.Server(uvicorn.Config(answers, http=protocol, lifespan="off", log_level="critical"))
    with socket.create_server(("127.0.0.1", 0)) as bound:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        until(lambda: server.started)
        yield bound.getsockname()[1]
        server.should_exit = True
        thread.join(20)


@pytest.mark.parametrize(
    ("sent", "after"),
    [
        (b"", b""),
        (HEAD, b"X-Slow: " + 100 * b"1"),
        (POST.replace(b": 10", b": 1000"), 100 * b"x"),
        (POST + b"0123456789", 100 * b"\r\n"),
        (HEAD + b"\r\n", HEAD),
    ],
    ids=["nothing", "head", "body", "empty lines after a request", "another head"],
)
def test_a_request_that_is_never_whole_ends(port: int, sent: bytes, after: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        began = time.monotonic()
        client.sendall(sent)
        client.settimeout(0.1)
        with pytest.raises(OSError):
            # A byte now and then keeps no connection.
            for place in range(100):
                client.sendall(after[place : place + 1])
                with suppress(TimeoutError):
                    if client.recv(1000) == b"":
                        raise OSError
        assert time.monotonic() - began < 4


def test_a_whole_request_is_answered_however_long_it_takes_to_come_again(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        for _ in range(3):
            client.sendall(POST + b"0123456789")
            assert client.recv(1000).endswith(b"whole")
            time.sleep(0.7)


def test_one_address_has_few_connections(port: int) -> None:
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
        refused = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
        assert _got(refused) == b""
        other = stack.enter_context(socket.create_connection(("127.0.0.1", port), 20, ("127.0.0.2", 0)))
        other.sendall(HEAD + b"\r\n")
        assert other.recv(1000).endswith(b"whole")


@pytest.mark.parametrize("port", ["127.0.0.1"], indirect=True)
def test_a_trusted_proxy_has_any_number(port: int) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20)) for _ in range(6)]
        for client in clients:
            client.sendall(HEAD + b"\r\n")
            assert client.recv(1000).endswith(b"whole")


@pytest.mark.nightly
def test_a_service_with_1024_files_answers_while_others_hold_their_requests_back(tmp_path: Path) -> None:
    server = start(tmp_path, prefix=("sh", "-c", 'ulimit -n 1024; exec "$@"', "sh"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    try:
        with ExitStack() as stack:
            for number in range(1500):
                source = (f"127.0.1.{1 + number // 100}", 0)
                client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 20, source))
                client.sendall(HEAD)
            # The machine's own browser is let in when the first of them have had their time.
            until(lambda: _is_answered(server.port), seconds=2 * connections.HEAD_SECONDS + 20)
        server.first_administrator()
        assert server.ask("GET", "/api/runs").status == 200
        assert "Traceback" not in server.output.read_text()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        server.kill()


def _got(client: socket.socket) -> bytes:
    try:
        return client.recv(1000)
    except ConnectionResetError:
        return b""


def _is_answered(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        try:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            return client.recv(1000).startswith(b"HTTP/1.1 200")
        except OSError:
            return False
