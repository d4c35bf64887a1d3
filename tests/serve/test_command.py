"""`ortlaunch serve` as a process: what it refuses, its files, and its end."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine, select, text

from ortlaunch.base.errors import RequestError
from ortlaunch.base.locks import exclusive
from ortlaunch.serve import command, database
from ortlaunch.serve.database import open_database
from ortlaunch.serve.queue import store
from ortlaunch.serve.queue.tables import Job
from ortlaunch.serve.settings import Settings
from ortlaunch.serve.tables import User
from tests.support.certificates import new_key, self_signed
from tests.support.cli import answer, ortlaunch
from tests.support.service import PASSWORD, Server, cookie_of, packages, start
from tests.support.waiting import until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    started = start(tmp_path)
    yield started
    if started.process.poll() is None:
        started.kill()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host=0.0.0.0"], "needs TLS"),
        (["--host=192.0.2.1"], "needs TLS"),
        (["--host=::"], "needs TLS"),
        (["--trusted-proxy=192.0.2.1"], "needs --public-url https://"),
        (["--trusted-proxy=192.0.2.1", "--public-url=http://runs.example"], "needs --public-url https://"),
        (["--trusted-proxy=*", "--public-url=https://runs.example"], "must be an IP address"),
        (["--tls-certificate=missing.pem"], "go together"),
        (["--tls-certificate=missing.pem", "--tls-key=missing.key"], "there is no such file"),
        (["--public-url=runs.example"], "must be https://NAME"),
        (["--public-url=https://runs.example/path"], "must be https://NAME"),
        (["--public-url=https://[runs.example"], "must be https://NAME"),
        (["--public-url=https://runs.example:port"], "must be https://NAME"),
        (["--host=0.0.0.0", "--trusted-proxy=192.0.2.1", "--port=65536"], "must be a port"),
        (["--root=runs", "--root=missing"], "there is no such folder"),
        (["--root=/proc/nowhere"], "cannot be made: No such file or directory: choose another place by --root"),
        (["--slots=0"], "must be a number, 1 or more"),
        (["--on-end=/no/such/program a"], "there is no such program"),
        (["--on-end='open"], "No closing quotation"),
        (["--link=ada"], "there is no database"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_would_be_open_or_cannot_work_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    result = answer(tmp_path, capfd, "serve", *arguments)
    assert result.returncode == 2
    assert words in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", ["another key", "a passphrase", "no certificate"])
def test_a_certificate_that_cannot_be_used_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], case: str
) -> None:
    certificate, key = self_signed(tmp_path)
    if case == "another key":
        key.write_bytes(new_key())
    elif case == "a passphrase":
        key.write_bytes(new_key(b"secret"))
    else:
        certificate.write_text("no certificate\n")
    result = answer(tmp_path, capfd, "serve", f"--tls-certificate={certificate}", f"--tls-key={key}")
    assert result.returncode == 2
    assert f"the certificate {certificate} and the key {key} cannot be used: " in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_restart_after_a_crash_keeps_who_is_logged_in(server: Server, tmp_path: Path) -> None:
    server.first_administrator()
    folder = tmp_path / "runs" / ".serve"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.glob("serve.db*")} == {0o600}
    second = ortlaunch(tmp_path, "serve", "--port=0")
    assert second.returncode == 2
    assert "another service uses" in second.stderr
    server.kill()
    again = start(tmp_path)
    try:
        assert again.link is None, "there is an administrator"
        again.cookie = server.cookie
        assert again.ask("GET", "/api/session").json["name"] == "ada"
        link = ortlaunch(tmp_path, "serve", "--link=ada").stdout.strip().rpartition("/")[2]
        used = again.ask("POST", "/api/link", {"link": link, "password": "another " + PASSWORD})
        assert used.status == 200
        assert again.ask("GET", "/api/session").status == 401, "the old session ended with the old password"
        again.cookie = cookie_of(used)
        assert again.ask("GET", "/api/session").status == 200
    finally:
        again.end()
    assert "Traceback" not in again.output.read_text()
    assert PASSWORD not in again.output.read_text()


_STOPS_CHILDREN = """
import os, signal, sys
if "ortlaunch.serve.act" in sys.orig_argv:
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_ctrl_c_ends_it_at_once_while_a_child_gives_no_answer(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_STOPS_CHILDREN)
    server = start(tmp_path, PYTHONPATH=os.pathsep.join([str(tmp_path), *packages()]))
    service = psutil.Process(server.process.pid)
    children: list[psutil.Process] = []
    try:
        server.first_administrator()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(server.ask, "POST", "/api/runs/check", {"keys": {}})
            children = until(lambda: [one for one in service.children() if one.status() == psutil.STATUS_STOPPED])
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(120) == 130
            assert children[0].status() == psutil.STATUS_STOPPED, "the service has waited until it could kill it"
            answer = asked.result()
        assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
        assert "the service is ending" in answer.json["problems"][0]["message"]
        assert "Traceback" not in server.output.read_text()
    finally:
        for child in children:
            child.kill()
        if server.process.poll() is None:
            server.kill()


class _Part(NamedTuple):
    mountpoint: str
    fstype: str


def test_two_services_of_a_root_give_out_its_slots_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = Settings(root=tmp_path / "runs")
    settings.slots_lock.parent.mkdir(parents=True, mode=0o700)
    with exclusive(settings.slots_lock):
        result = answer(tmp_path, capfd, "serve", "--port=0", f"--database={tmp_path / 'another' / 'serve.db'}")
    assert (result.returncode, "another service starts the runs of" in result.stderr) == (2, True)


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "lustre", "fuse.sshfs"])
def test_a_database_on_a_network_file_system_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    parts = [_Part("/", "ext4"), _Part(str(tmp_path), kind)]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: parts)
    with pytest.raises(RequestError, match=r"network file system .*--database"):
        open_database(tmp_path / "runs" / "serve.db")
    assert list(tmp_path.iterdir()) == []


def test_a_database_that_others_could_exchange_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(RequestError, match="can be written by every user"):
        open_database(folder / "serve.db")
    folder.chmod(0o755)
    open_database(folder / "serve.db").dispose()


def test_tables_of_the_first_version_are_carried_on(tmp_path: Path) -> None:
    path = tmp_path / "serve.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((Path(__file__).parent / "version_1.sql").read_text())
    engine = open_database(path)
    with database.reading(engine) as session:
        ended, waiting = session.scalars(select(Job).order_by(Job.number))
        assert (ended.outcome, waiting.state, waiting.request["keys"]) == ("finished", "waiting", {"train.steps": 7})
        assert (waiting.slots, waiting.needs) == (1, {})
        assert [one.role for one in session.scalars(select(User).order_by(User.name))] == ["admin", "runner"]
        assert store.switches(session).paused
    assert _missing(engine) == []
    assert database.schema_version(path) == database.VERSION


def test_a_migration_that_fails_leaves_the_tables_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "serve.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((Path(__file__).parent / "version_1.sql").read_text())
        connection.execute("ALTER TABLE jobs ADD COLUMN limits JSON")
        before = list(connection.iterdump())
    with pytest.raises(RequestError, match="cannot be used as a database: duplicate column"):
        open_database(path)
    with closing(sqlite3.connect(path)) as connection:
        assert list(connection.iterdump()) == before


def test_the_migrations_make_the_tables_that_are_declared(tmp_path: Path) -> None:
    engine = open_database(tmp_path / "serve.db")
    assert _missing(engine) == []
    with database.reading(engine) as session:
        assert session.execute(text("SELECT version_num FROM alembic_version")).scalar() == f"{database.VERSION:04}"


def _missing(engine: Engine) -> list[object]:
    """What another migration would have to change."""
    with engine.begin() as connection:
        found = compare_metadata(MigrationContext.configure(connection), database.Base.metadata)
    engine.dispose()
    return found


def test_tables_of_a_later_version_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "serve.db"
    open_database(path).dispose()
    assert database.schema_version(path) == database.VERSION
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {database.VERSION + 1}")
    with pytest.raises(RequestError, match="tables of version"):
        open_database(path)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "serve.db"
    path.write_text("not a database, but long enough to be looked at as one\n" * 100)
    with pytest.raises(RequestError, match="cannot be used as a database"):
        open_database(path)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (
            ["CREATE TABLE alembic_version (version_num)", "CREATE TABLE runs (run_uuid)"],
            "another program .alembic_ver",
        ),
        (
            [f"PRAGMA user_version = {database.VERSION}", "CREATE TABLE jobs (id, number)"],
            "table jobs .* lacks user_id, ",
        ),
    ],
    ids=["of another program", "older tables"],
)
def test_a_database_that_is_not_ours_stays_as_it_is(tmp_path: Path, made: list[str], words: str) -> None:
    path = tmp_path / "mlruns.db"
    with closing(sqlite3.connect(path)) as connection:
        for statement in made:
            connection.execute(statement)
    path.chmod(0o644)
    before = path.read_bytes()
    with pytest.raises(RequestError, match=words):
        open_database(path)
    assert path.read_bytes() == before
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["text", "folder", "link"])
def test_a_database_that_is_refused_has_no_lock_beside_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    path = tmp_path / "wrong.db"
    if kind == "text":
        path.write_text("not a database, but long enough to be looked at as one\n" * 100)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "elsewhere")
    result = answer(tmp_path, capfd, "serve", f"--database={path}", "--port=0")
    assert result.returncode == 2
    assert "database" in result.stderr and str(path) in result.stderr
    assert list(tmp_path.iterdir()) == [path]


def test_a_port_that_is_taken_leaves_nothing_behind(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = ["serve", f"--port={taken.getsockname()[1]}"]
        result = answer(tmp_path, capfd, *words)
        assert result.returncode == 2
        assert "cannot be used: Address already in use" in result.stderr
        assert list(tmp_path.iterdir()) == []
        # If the service of this database is there, it probably has the port.
        folder = tmp_path / "runs" / ".serve"
        folder.mkdir(mode=0o700, parents=True)
        with exclusive(folder / "serve.lock"):
            result = answer(tmp_path, capfd, *words)
    assert (result.returncode, "another service uses" in result.stderr) == (2, True)


def test_a_host_that_cannot_be_looked_up_is_refused() -> None:
    with pytest.raises(RequestError, match=r"aaa:8470 cannot be used: .*too long"):
        command._bound(Settings(host=64 * "a"))


def test_a_client_that_reads_nothing_keeps_no_connection_for_ever() -> None:
    with command._bound(Settings(port=0)) as bound, socket.create_connection(bound.getsockname()):
        connection, _ = bound.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 300_000


def test_requests_wait_for_no_connection_while_many_are_at_work(tmp_path: Path) -> None:
    """As while the database is locked, when each thread that writes waits for ten seconds."""
    engine = open_database(tmp_path / "serve.db")
    with ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(database.reading(engine)).execute(text("SELECT 1"))
    engine.dispose()
