"""Real MLflow servers on loopback ports, and what may stand between them and a run."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tests.support.needs import needs

START_SECONDS = 150
"""A start is seconds of processor time, which other tests may want too."""
_FIRST_PORT = 24_000


def free_port() -> int:
    """A port of the loopback address that nobody listens on.

    It is one that the kernel gives nobody who asks for any port, as each connection of another test does.
    """
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    last = given if given > _FIRST_PORT else 2 * _FIRST_PORT
    while True:
        port = random.randrange(_FIRST_PORT, last)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Server:
    """An `mlflow server` on a loopback port that is known before it is up."""

    def __init__(
        self,
        folder: Path,
        command: list[str] | None = None,
        environment: dict[str, str] | None = None,
        within: Sequence[str] = (),
    ) -> None:
        """
        Args:
            folder: where it keeps its database, its artifacts and its log.
            command: starts another server than MLflow's plain one on sqlite; ``{port}`` stands for the port.
            environment: further variables.
            within: a command that starts it, such as ``nice -n 19`` or ``taskset -c 3``.
        """
        self.folder = folder
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        words = [*within, *(command or self._plain())]
        self._command = [word.replace("{port}", str(self.port)) for word in words]
        self.environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None

    def up(self) -> None:
        """Starts it unless it runs, and waits until it answers."""
        if self._process is None:
            environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", **self.environment}
            with (self.folder / "server.log").open("ab") as log:
                self._process = subprocess.Popen(
                    self._command, stdout=log, stderr=log, env=environment, cwd=self.folder, start_new_session=True
                )
        deadline = time.monotonic() + START_SECONDS
        while not self._healthy():
            assert time.monotonic() < deadline, (self.folder / "server.log").read_text()[-2000:]
            time.sleep(0.1)

    def freeze(self) -> None:
        """It still takes connections and answers nothing."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """It goes on."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """It is gone."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait(60)
            self._process = None

    def _plain(self) -> list[str]:
        return [
            *(sys.executable, "-m", "mlflow", "server", "--workers", "1", "--host", "127.0.0.1", "--port", "{port}"),
            *("--backend-store-uri", f"sqlite:///{self.folder}/server.db"),
            *("--artifacts-destination", str(self.folder / "artifacts")),
        ]

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def points(client: Any, run: Any) -> Counter[tuple[str, int, float]]:
    """How often each point (metric, step, value) of a run is in MLflow."""
    history = ((key, point) for key in run.data.metrics for point in client.get_metric_history(run.info.run_id, key))
    return Counter((key, point.step, point.value) for key, point in history)


@contextmanager
def between(uri: str, before: Callable[[str], None]) -> Iterator[str]:
    """A way to a server on which something happens before each request goes on; yields its address.

    Args:
        uri: the server.
        before: is called with the request's path.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            before(self.path)
            names = ("Content-Type", "Authorization")
            headers = {name: self.headers[name] for name in names if name in self.headers}
            request = Request(uri + self.path, body or None, headers, method=self.command)
            try:
                with urlopen(request, timeout=200) as answer:
                    status, text = answer.status, answer.read()
            except HTTPError as error:
                status, text = error.code, error.read()
            with suppress(OSError):  # The client may have hung up.
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    with serving(Handler) as address:
        yield address


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """A server on the loopback address; yields its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


@contextmanager
def silent() -> Iterator[str]:
    """A server that takes connections and never answers; yields its address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def postgres(user: str, password: str, database: str) -> Iterator[int]:
    """A PostgreSQL server of its own with one database, reached by password; yields its port.

    PostgreSQL does not run as root: then it is run as the user that Debian's package made for it, in a folder that this
    user can reach.
    """
    tools = _postgres_tools()
    needs(tools, "needs Debian's package postgresql")
    assert tools is not None
    port = free_port()
    as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory(prefix="postgres-") as name:
        folder = Path(name)
        data, secret = folder / "data", folder / "password"
        secret.write_text(password)
        secret.chmod(0o600)
        if as_user:
            for path in (folder, secret):
                shutil.chown(path, "postgres", "postgres")
        words = ["-D", data, "-U", user, f"--pwfile={secret}", "--auth=scram-sha-256"]
        subprocess.run(
            [*as_user, tools / "initdb", *words], check=True, stdout=subprocess.DEVNULL, cwd=folder, timeout=120
        )
        with (folder / "postgres.log").open("wb") as log:
            server = subprocess.Popen(
                [
                    *(*as_user, tools / "postgres", "-D", data, "-p", str(port)),
                    *("-c", f"unix_socket_directories={folder}", "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"),
                ],
                stdout=log,
                stderr=log,
                cwd=folder,
                start_new_session=True,
            )
        try:
            environment = {**os.environ, "PGPASSWORD": password}
            create = [tools / "createdb", "-h", "127.0.0.1", "-p", str(port), "-U", user, database]
            deadline = time.monotonic() + START_SECONDS
            while subprocess.run(create, env=environment, capture_output=True, check=False).returncode:
                assert time.monotonic() < deadline, (folder / "postgres.log").read_text()
                time.sleep(0.2)
            yield port
        finally:
            # Its fast way to stop: it ends those that are connected.
            server.send_signal(signal.SIGINT)
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait(10)


def _postgres_tools() -> Path | None:
    """The folder with initdb and postgres of Debian's newest package; None without one."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return found[-1].parent if found else None
