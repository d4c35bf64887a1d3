"""`ortlaunch --server URL …` against a real service, and against ones that misbehave."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.run.identity import start_ticks
from ortlaunch.run.journal import Journal
from ortlaunch.serve.client import command, following, show
from ortlaunch.serve.client.command import keys_of
from ortlaunch.serve.client.connection import Connection
from tests.launch.follow.conftest import Maker
from tests.support.cli import answer
from tests.support.service import Server, start
from tests.support.waiting import until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("service")
    maker = Maker(folder / "runs")
    run_dir = maker("first", run_id="aaaaa1", step=40)
    (run_dir / "logs" / "rank-0.log").write_text(
        "".join(f"line {number}\n" for number in range(30_000)) + "\x1b[31mred"
    )
    maker("second", run_id="aaaaa2", step=7, end="FAILED")
    started = start(folder)
    started.first_administrator()
    yield started
    started.kill()


@pytest.fixture
def ask(server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    secret = server.ask("POST", "/api/tokens", {"name": "test", "role": "runner"}).json["secret"]
    monkeypatch.setenv("ORTLAUNCH_TOKEN", secret)
    return lambda *words: answer(tmp_path, capfd, "--server", server.url, *words)


def test_jobs_lists_what_the_service_has(ask: Any) -> None:
    result = ask("jobs")
    assert result.returncode == 0, result.stderr
    assert [line.split()[1] for line in result.stdout.splitlines()[2:4]] == ["second", "first"]
    rows = json.loads(ask("jobs", "--json", "--state", "failed").stdout)
    assert [row["name"] for row in rows] == ["second"]


def test_status_says_everything_about_a_run(ask: Any) -> None:
    text = ask("status", "aaaaa1").stdout
    assert "finished" in text
    assert "40 of 100" in text
    assert "loss 2.5" in text
    assert ask("status", "bbbbb1").returncode == 2


def test_a_log_comes_whole_and_without_control_characters(ask: Any) -> None:
    lines = ask("logs", "aaaaa1").stdout.splitlines()
    assert lines[:-1] == [f"line {number}" for number in range(30_000)]
    assert lines[-1].endswith("red")
    assert "\x1b" not in lines[-1]
    assert ask("logs", "aaaaa1", "-f").stdout.splitlines() == lines, "it is over, so that following ends"
    assert ask("logs", "aaaaa1", "-n", "2").stdout.splitlines() == lines[-2:]


def test_of_a_long_log_only_the_end_is_read_for_its_last_lines(
    ask: Any, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    get = Connection.get

    def noting(self: Connection, *path: str, **query: Any) -> Any:
        asked.append(query.get("offset", 0))
        return get(self, *path, **query)

    monkeypatch.setattr(Connection, "get", noting)
    monkeypatch.setattr(following, "_PART_BYTES", 4096)
    lines = [f"line {number}" for number in range(30_000)]
    assert ask("logs", "aaaaa1", "-n", "3").stdout.splitlines()[:2] == lines[-2:]
    assert asked == [-4096]
    # More lines than one part has: further back, until they are enough.
    assert ask("logs", "aaaaa1", "-n", "1000").stdout.splitlines()[:999] == lines[-999:]
    assert len(asked) < 20
    monkeypatch.setattr(following, "_PART_BYTES", 65536)
    assert ask("logs", "aaaaa1", "-n", "40000").stdout.splitlines()[:-1] == lines


def test_more_rows_than_one_page_has(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_MOST_ROWS", 1)
    names = [row["name"] for row in json.loads(ask("jobs", "--json", "--last", "2").stdout)]
    assert names == [row["name"] for row in json.loads(ask("jobs", "--json", "--last", "200").stdout)][:2]
    assert len(names) == 2


def test_the_log_of_a_run_that_has_only_begun_is_waited_for(
    ask: Any, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = {"pid": os.getpid(), "host": socket.gethostname(), "start_ticks": start_ticks(os.getpid())}
    run = Maker(server.output.parent / "runs")("third", run_id="aaaaa3", step=None, end=None, launcher=alive)
    until(lambda: ask("status", "aaaaa3").returncode == 0)
    looks: list[float] = []

    def look_again(_seconds: float) -> None:
        """The command has found no log, or not its end."""
        looks.append(time.monotonic())
        if len(looks) == 2:
            (run / "logs" / "rank-0.log").write_text("hello\n")
            with Journal(run / "journal.jsonl") as journal:
                journal.end("FINISHED")
        time.sleep(0.1)
        assert looks[-1] - looks[0] < 120

    monkeypatch.setattr(following, "time", SimpleNamespace(sleep=look_again))
    followed = ask("logs", "aaaaa3", "-f")
    assert (followed.returncode, followed.stdout) == (0, "hello\n")
    assert followed.stderr == "ortlaunch: the run is running and has no such log yet: waiting for it\n"
    assert ask("logs", "aaaaa3", "--rank", "7", "-f").returncode == 2, "it is over, and no such log will come"


def test_what_the_service_refuses_is_one_message(ask: Any) -> None:
    result = ask("run", "model.target=os:system", "train.steps=0")
    assert result.returncode == 2
    assert result.stderr.startswith("ortlaunch: ")
    assert "model.target: setting this key needs the role author" in result.stderr
    assert "train.steps: must be at least 1" in result.stderr
    assert "a run is named here by its id" in ask("status", "a-name").stderr
    assert "is finished" in ask("cancel", "aaaaa1").stdout, "as the verb says of a run that is over"


def test_a_wrong_token_says_where_one_comes_from(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTLAUNCH_TOKEN", "ort_wrong")
    result = ask("jobs")
    assert result.returncode == 2
    assert "does not accept the token" in result.stderr
    assert "ort_wrong" not in result.stderr


@pytest.mark.parametrize(("mode", "words"), [(0o644, "chmod 600"), (0o640, "chmod 600"), (None, "there is no token")])
def test_a_token_that_others_can_read_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int | None, words: str
) -> None:
    monkeypatch.delenv("ORTLAUNCH_TOKEN", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "ortlaunch" / "token"
    if mode is not None:
        path.parent.mkdir()
        path.write_text("ort_secret\n")
        path.chmod(mode)
    with pytest.raises(RequestError, match=words):
        Connection("http://127.0.0.1:1")
    if mode is not None:
        path.chmod(0o600)
        Connection("http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://runs.example", "unencrypted"),
        ("ftp://runs.example", "must be https"),
        ("runs.example", "must be https"),
        ("https://name:secret@runs.example", "must be https"),
        ("https://[runs.example", "must be https"),
        ("https://runs.example:port", "must be https"),
        (f"https://{64 * 'a'}.example", "must be https"),
    ],
)
def test_a_token_goes_encrypted_or_stays_here(monkeypatch: pytest.MonkeyPatch, url: str, words: str) -> None:
    monkeypatch.setenv("ORTLAUNCH_TOKEN", "ort_x")
    with pytest.raises(RequestError, match=words):
        Connection(url)


@pytest.mark.parametrize("text", ["nan", "-1", "soon"])
def test_the_wait_for_an_end_is_a_number_of_seconds(text: str) -> None:
    with pytest.raises(RequestError, match="must be a number of seconds, 0 or more"):
        command.main(["--server", "https://runs.example", "cancel", "aaaaa1", f"--wait={text}"])


class _Odd(BaseHTTPRequestHandler):
    """A service that answers as the test says; it notes what it was asked."""

    answers: ClassVar[list[tuple[int, dict[str, str], bytes]]] = []
    asked: ClassVar[list[tuple[str, str | None, str | None]]] = []

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers.get("Authorization"), self.headers.get("Idempotency-Key")))
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        status, headers, body = self.answers.pop(0)
        if status == 0:
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> Iterator[Connection]:
    monkeypatch.setenv("ORTLAUNCH_TOKEN", "ort_x")
    _Odd.answers.clear()
    _Odd.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), _Odd) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield Connection(f"http://127.0.0.1:{made.server_port}")
        made.shutdown()


def test_no_redirect_takes_the_token_elsewhere(odd: Connection) -> None:
    _Odd.answers[:] = [(302, {"Location": f"{odd.url}/elsewhere"}, b"")]
    with pytest.raises(RequestError, match="HTTP 302"):
        odd.get("runs")
    assert len(_Odd.asked) == 1


def test_after_a_lost_connection_the_same_request_is_sent_again(odd: Connection) -> None:
    _Odd.answers[:] = [(0, {}, b""), (429, {"Retry-After": "0"}, b""), (201, {}, b'{"id": "x"}')]
    assert odd.post("runs", body={}, key="one") == {"id": "x"}
    assert [key for _, _, key in _Odd.asked] == ["one"] * 3
    _Odd.answers[:] = [(0, {}, b"")]
    with pytest.raises(RequestError, match="cannot be reached"):
        odd.post("runs", "x", "cancel")
    assert len(_Odd.asked) == 4, "without a key it may have been done"


def test_a_service_that_restarts_is_waited_for_by_who_follows_it(
    odd: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    away = [(0, {}, b""), (503, {}, b""), (502, {}, b"")] * 5
    _Odd.answers[:] = [(200, {}, b"{}"), *away, (200, {}, b'{"id": "x"}')]
    odd.get("runs")
    assert odd.get("runs", "x") == {"id": "x"}
    _Odd.answers[:] = [(200, {}, b"[]")]
    assert Connection(odd.url).get("runs") == []
    _Odd.answers[:] = away
    with pytest.raises(RequestError, match="no answer at the moment"):
        Connection(odd.url).get("runs")
    assert len(_Odd.answers) == len(away) - 2, "one that has never answered is not waited for"


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [(200, b"<html>", "is no JSON"), (500, b"oops", "HTTP 500"), (503, b"", "no answer at the moment")],
)
def test_an_answer_that_is_none_is_one_message(odd: Connection, status: int, body: bytes, words: str) -> None:
    _Odd.answers[:] = [(status, {}, body)]
    with pytest.raises(RequestError, match=words):
        odd.get("runs")


def test_the_parts_of_a_path_stay_parts(odd: Connection) -> None:
    _Odd.answers[:] = [(200, {}, b"{}")]
    odd.get("runs", "../users?x=1#")
    assert _Odd.asked[0][0] == "/api/runs/..%2Fusers%3Fx%3D1%23"


def test_the_newest_checkpoint_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """The service gives the newest one first."""
    found = [{"step": step, "complete": step != 30} for step in (30, 20, 10)]
    show.outcome({"name": "one", "id": "a", "state": "stopped", "reason": "at step 20", "checkpoints": found})
    assert capsys.readouterr().out == "one (a) is stopped (at step 20); checkpoint of step 20\n"


def test_words_become_json_scalars() -> None:
    job, keys = keys_of(
        ["+jobs=gpt2", "train.steps=5", "optimizer.lr=1e-3", "name=a=b", "seed=null", "x=true", "y=[1]"]
    )
    assert job == "gpt2"
    assert keys == {
        "train.steps": 5,
        "optimizer.lr": 0.001,
        "name": "a=b",
        "seed": None,
        "x": True,
        "y": "[1]",
    }
    for word in ("train.steps", "+x=1", "~x=1", "=1", "--multirun"):
        with pytest.raises(RequestError, match="takes"):
            keys_of([word])
