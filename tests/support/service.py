"""The service within this process, with people who are logged in; and as a process of its own."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import site
import ssl
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.testclient import TestClient

import ortlaunch
from ortlaunch.serve import accounts, tokens
from ortlaunch.serve.access import COOKIE, Caller, Role
from ortlaunch.serve.app import make_app
from ortlaunch.serve.secret import csrf_of
from ortlaunch.serve.service import Service
from ortlaunch.serve.settings import Settings

HOST = "127.0.0.1:8470"
ORIGIN = f"https://{HOST}"
PASSWORD = "correct horse battery"


@dataclass
class InProcess:
    """The service without a server. Its background parts are started only if it is asked for."""

    app: FastAPI
    callers: dict[str, Caller] = field(default_factory=dict)

    @property
    def service(self) -> Service:
        found: Service = self.app.state.service
        return found

    def client(self, headers: Mapping[str, str] | None = None) -> TestClient:
        """A client without cookies, which raises no error of the service's."""
        return TestClient(self.app, base_url=ORIGIN, headers=dict(headers or {}), raise_server_exceptions=False)

    def person(self, name: str, role: Role, unix_user: str | None = None) -> Caller:
        """A user who has chosen the password `PASSWORD`; the same one when asked for again."""
        if name not in self.callers:
            made = Caller(0, "terminal", Role.admin, None)
            user, link = accounts.add_user(self.service, made, name, role, unix_user)
            self.service.limits.login.__init__(1000, 60.0)
            accounts.use_link(self.service, link, "", PASSWORD, "test")
            self.callers[name] = Caller(user.id, name, role, unix_user)
        return self.callers[name]

    def token(self, name: str, role: Role, unix_user: str | None = None) -> dict[str, str]:
        """The header of a program of this person."""
        self.service.limits.token.__init__(100_000, 1.0)
        _, secret = tokens.make_token(self.service, self.person(name, role, unix_user), "test", role, 1)
        return {"Authorization": f"Bearer {secret}"}

    def browser(self, name: str, role: Role) -> dict[str, str]:
        """The headers of this person's browser, with everything that a page of the service sends along."""
        self.person(name, role)
        self.service.limits.login.__init__(1000, 60.0)
        self.service.limits.name.__init__(1000, 60.0)
        secret = accounts.login(self.service, name, PASSWORD, "test")
        return {
            "Cookie": f"{COOKIE}={secret}",
            "Origin": ORIGIN,
            "Sec-Fetch-Site": "same-origin",
            "X-CSRF-Token": csrf_of(secret),
        }


def in_process(root: Path, **settings: Any) -> InProcess:
    """The service of a run root."""
    return InProcess(make_app(Settings(root=root, **settings)))


@dataclass
class Answer:
    """An answer of a real service."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Server:
    """`ortlaunch serve` as a process."""

    process: subprocess.Popen[str]
    port: int
    link: str | None
    """The secret of the first administrator's link."""
    output: Path
    cookie: str = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
        """Sends a request, as the browser of whoever has logged in here, unless it has a token."""
        sent = {"Content-Type": "application/json", **(headers or {})}
        if "Authorization" not in sent:
            sent["Origin"] = self.url
            if self.cookie:
                sent |= {"Cookie": f"{COOKIE}={self.cookie}", "X-CSRF-Token": csrf_of(self.cookie)}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), sent)
            found = connection.getresponse()
            return Answer(found.status, found.headers, found.read())
        finally:
            connection.close()

    def first_administrator(self, name: str = "ada") -> None:
        """Uses the link of the terminal, and stays logged in."""
        answer = self.ask("POST", "/api/link", {"link": self.link, "name": name, "password": PASSWORD})
        assert answer.status == 200, answer.body
        self.cookie = cookie_of(answer)

    def kill(self) -> None:
        """Ends it as a crash does."""
        self.process.kill()
        self.process.wait(60)

    def end(self) -> int:
        """Ends it as systemd does, and returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)


def cookie_of(answer: Answer) -> str:
    """The session that an answer sets."""
    found = re.search(rf"{COOKIE}=([^;]+)", answer.headers["Set-Cookie"])
    assert found is not None
    return found[1]


def start(
    folder: Path,
    *arguments: str,
    wait: float = 150.0,
    port: int = 0,
    prefix: Sequence[str] = (),
    python: str = sys.executable,
    **variables: str,
) -> Server:
    """Starts `ortlaunch serve` in a folder, on a free port, and waits until it answers.

    Args:
        folder: where it runs.
        *arguments: its options.
        wait: seconds.
        port: the port, where the address that it prints is not the one that it listens on.
        prefix: words before its command, which start it as another user.
        python: the Python that it runs with.
        **variables: of its environment.
    """
    output = folder / "serve.out"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(packages()), **variables}
    with open(output, "w") as stream:
        process = subprocess.Popen(
            [*prefix, python, "-m", "ortlaunch", "serve", f"--port={port}", *arguments],
            cwd=folder,
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
            text=True,
        )
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline:
        said = re.search(r"ortlaunch serve: (https?)://[^:\s]+:(\d+) ", output.read_text())
        at = port or (int(said[2]) if said is not None else 0)
        if said is not None and _answers(at, has_tls=not port and said[1] == "https"):
            link = re.search(r"/link/([\w-]+)\n", output.read_text())
            return Server(process, at, link[1] if link else None, output)
        assert process.poll() is None, output.read_text()
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"the service did not start: {output.read_text()}")


def packages() -> list[str]:
    """Where the service finds packages, also with another Python. Some packages put folders of theirs on this path."""
    return [str(Path(ortlaunch.__file__).parents[1]), *site.getsitepackages()]


def _answers(port: int, *, has_tls: bool) -> bool:
    kind = http.client.HTTPSConnection if has_tls else http.client.HTTPConnection
    more = {"context": ssl._create_unverified_context()} if has_tls else {}
    connection = kind("127.0.0.1", port, timeout=5, **more)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
