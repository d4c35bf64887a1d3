"""Event streams over a real server: exact after a reconnect, shared, bounded, and over when somebody may not listen."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import event

from ortlaunch.base.text import public_text
from ortlaunch.run.run import Run
from ortlaunch.serve import streams
from ortlaunch.serve.access import Role, those_allowed
from ortlaunch.serve.database import writing
from ortlaunch.serve.follow import curves
from ortlaunch.serve.streams import MOST_STREAMS, MOST_TOPICS, parsed_topics
from ortlaunch.serve.tables import Token
from ortlaunch.serve.tails import FileTail, JournalTail
from ortlaunch.serve.tokens import make_token, revoke_token
from tests.launch.follow.conftest import Maker
from tests.serve.follow.live import Stream, listening, opened
from tests.support.service import InProcess
from tests.support.waiting import PATIENCE, until


@pytest.fixture(autouse=True)
def looks_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams look ten times a second."""
    monkeypatch.setattr(streams, "_SECONDS", 0.1)


@pytest.fixture
def port(served: InProcess, make_run: Maker) -> Iterator[int]:
    make_run("followed", run_id="00aa00", end=None)
    with listening(served) as number:
        until(lambda: served.service.runs.passes > 0)
        yield number


@pytest.fixture
def token(served: InProcess) -> dict[str, str]:
    return served.token("vera", Role.viewer)


@pytest.fixture
def log(port: int, tmp_path: Path) -> Path:
    (run_dir,) = (tmp_path / "runs" / "default").iterdir()
    return run_dir / "logs" / "rank-0.log"


def append(log: Path, text: str) -> None:
    with log.open("a") as file:
        file.write(text)


def is_followed_from(served: InProcess, at: int) -> bool:
    """Whether a stream has looked at a log from a byte on."""
    return any(isinstance(key[0], streams.File) and key[1] == at for key in list(served.service.streams._looks))


def text_of(stream: Stream, end: str) -> str:
    """What a stream's log events say until a line comes."""
    text = ""
    while not text.endswith(end):
        text += stream.until("log")[0].data["text"]
    return text


def test_a_log_goes_on_exactly_where_a_stream_was_cut(port: int, token: dict, log: Path) -> None:
    log.write_text("line 0\n")
    first = opened(port, token, "log:00aa00:0@0")
    assert text_of(first, "line 0\n") == "line 0\n"
    append(log, "line 1\nline 2\nunfinis")
    assert text_of(first, "line 2\n") == "line 1\nline 2\n"
    first.close()
    append(log, "hed\n" + "".join(f"line {number}\n" for number in range(3, 30_000)))
    second = opened(port, token, "log:00aa00:0", first.last)
    append(log, "the end\n")
    expected = "unfinished\n" + "".join(f"line {number}\n" for number in range(3, 30_000)) + "the end\n"
    assert text_of(second, "the end\n") == expected
    second.close()


def test_who_comes_late_reads_from_the_beginning_and_then_together_with_all(
    port: int, token: dict, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a log grows, streams that are at one place stay together: a piece is read once for all of them."""
    read: list[tuple[int, int]] = []
    read_piece = FileTail.read

    def noting(tail: FileTail, position: int, until: int | None = None) -> object:
        piece = read_piece(tail, position, until)
        if piece.content is not None:
            read.append((position, piece.next))
        return piece

    monkeypatch.setattr(FileTail, "read", noting)
    early = [opened(port, token, "log:00aa00:0@0") for _ in range(3)]
    texts: list[str] = []
    # They read by themselves, as browsers do.
    readers = [threading.Thread(target=lambda one=one: texts.append(text_of(one, "the end\n"))) for one in early]
    for reader in readers:
        reader.start()
    began = time.monotonic()
    late, number = None, 0
    while time.monotonic() < began + 2:
        append(log, "".join(f"{number + one:06d} {'x' * 90}\n" for one in range(50)))
        number += 50
        time.sleep(0.01)
        if late is None and time.monotonic() > began + 1:
            late = opened(port, token, "log:00aa00:0@0,list")
    append(log, "the end\n")
    assert late is not None
    texts.append(text_of(late, "the end\n"))
    for reader in readers:
        reader.join(PATIENCE)
    assert texts == [log.read_text()] * 4
    assert len(read) == len(set(read)), "a piece was read twice"
    assert len([end for _, end in read if end == log.stat().st_size]) == 1, "they are not at one place"
    for one in (*early, late):
        one.close()


def test_a_page_and_its_stream_join_without_a_gap(port: int, token: dict, log: Path, served: InProcess) -> None:
    append(log, "one\ntwo\n")
    viewer = served.client(token)
    page = viewer.get("/api/runs/00aa00/logs/0").json()
    append(log, "three\n")
    stream = opened(port, token, f"log:00aa00:0@{page['next']}")
    assert page["text"] + text_of(stream, "three\n") == "one\ntwo\nthree\n"
    # Without a position it begins at the end.
    other = opened(port, token, "log:00aa00:0")
    until(lambda: is_followed_from(served, log.stat().st_size))
    append(log, "four\n")
    assert text_of(other, "four\n") == "four\n"
    for one in (stream, other):
        one.close()


def test_a_file_that_was_replaced_begins_again(port: int, token: dict, log: Path) -> None:
    log.write_text("a first text that is long\n")
    stream = opened(port, token, "log:00aa00:0@0")
    text_of(stream, "long\n")
    log.unlink()
    log.write_text("new\n")
    assert stream.until("reset")[0].data == {"topic": "log:00aa00:0"}
    assert text_of(stream, "new\n") == "new\n"
    stream.close()


def test_new_points_and_the_state_of_a_run(port: int, token: dict, log: Path, served: InProcess) -> None:
    page = served.client(token).get("/api/runs/00aa00/metrics").json()
    stream = opened(port, token, f"run:00aa00@{page['offset']},list")
    assert stream.until("run")[0].data["row"]["state"] == "killed"
    with Run(log.parents[1]).journal() as journal:
        journal.metrics(120, {"train/loss": 1.25, "train/lr": float("inf")})
        journal.end("FINISHED")
    points: dict[str, list] = {}
    ended = None
    while ended is None:  # The file may be looked at between the two lines.
        found = stream.until("run")[0].data
        points |= found.get("points", {})
        ended = found.get("ended")
    assert (points, ended) == ({"train/loss": [[120, 1.25]], "train/lr": [[120, None]]}, "FINISHED")
    stream.close()


def test_changes_of_the_list_come_and_are_given_again(
    port: int, token: dict, make_run: Maker, served: InProcess
) -> None:
    stream = opened(port, token, "list")
    make_run("second")
    (change,) = stream.until("list")
    while [row["name"] for row in change.data["rows"]] != ["second"]:
        (change,) = stream.until("list")
    stream.close()
    third = make_run("third")
    until(lambda: served.service.streams._changes.number > int(change.id.rpartition(".")[2]))
    again = opened(port, token, "list", change.id)
    assert [row["name"] for row in again.until("list")[0].data["rows"]] == ["third"]
    shutil.rmtree(third)
    assert again.until("list")[0].data["gone"] == [f"{third.name[:15]}-{third.name[-6:]}"]
    again.close()
    lost = opened(port, token, "list", "list@abcdef.3")
    assert lost.read().event == "reload"
    lost.close()


def test_a_token_that_is_revoked_ends_its_streams(
    port: int, token: dict, log: Path, served: InProcess, caplog: pytest.LogCaptureFixture
) -> None:
    stream = opened(port, token, "log:00aa00:0")
    with writing(served.service.engine) as session:
        session.query(Token).update({"revoked": time.time()})
    assert "revoked" in stream.until("bye")[0].data["reason"]
    with pytest.raises(EOFError):
        stream.read()
    assert "without completing" not in caplog.text


def test_one_user_has_so_many_streams(port: int, token: dict, served: InProcess) -> None:
    streams = [opened(port, token, "list") for _ in range(MOST_STREAMS)]
    with pytest.raises(AssertionError, match="429"):
        opened(port, token, "list")
    opened(port, served.token("otto", Role.viewer), "list").close()
    streams.pop().close()
    until(lambda: served.service.streams.count < MOST_STREAMS)
    streams.append(opened(port, token, "list"))
    for stream in streams:
        stream.close()


def test_a_browser_that_reads_nothing_is_cut_off_and_keeps_nobody_waiting(
    port: int, token: dict, log: Path, served: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_STUCK_SECONDS", 1.0)
    idle = socket.create_connection(("127.0.0.1", port))
    idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    lines = [f"GET /api/events?topics=log:00aa00:0@0 HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"]
    lines += [f"{name}: {value}\r\n" for name, value in token.items()]
    idle.sendall("".join([*lines, "\r\n"]).encode())
    awake = opened(port, token, "log:00aa00:0@0")
    until(lambda: served.service.streams.count == 2)
    total = 0
    while served.service.streams.count == 2:
        append(log, ("y" * 99 + "\n") * 1999 + "y" * 98 + "!\n")
        total += 2000
        assert total < 400_000
        assert text_of(awake, "!\n").count("\n") == 2000
    append(log, "the end\n")
    assert text_of(awake, "the end\n") == "the end\n"
    awake.close()
    idle.close()


def test_topics_that_cannot_be_read_are_refused(served: InProcess, token: dict, make_run: Maker) -> None:
    make_run(run_id="00aa00")
    served.service.runs.refresh()
    viewer = served.client(token)
    refused = {"": 422, "nothing": 422, "log:00aa00": 422, "log:00aa00:../x": 422, "run:123456": 404}
    refused |= {",".join(f"run:{number:06d}" for number in range(MOST_TOPICS + 1)): 422}
    assert {topics: viewer.get("/api/events", params={"topics": topics}).status_code for topics in refused} == refused
    assert served.client().get("/api/events", params={"topics": "list"}).status_code == 401
    assert parsed_topics("list@a.1,run:x@5,junk", is_strict=False) == {"list": "a.1", "run:x": "5"}


def test_a_topic_that_is_gone_silences_no_other(port: int, token: dict, log: Path) -> None:
    log.write_text("a line\n")
    gone = [f"run:{number:06x}@5" for number in range(16, 16 + 40)]
    stream = opened(port, token, ",".join([*gone, "log:123456:0", "log:00aa00:0@0", "log:00aa00:-", "list"]))
    assert text_of(stream, "a line\n") == "a line\n"
    stream.close()


def test_a_look_that_fails_ends_no_stream(
    port: int, token: dict, log: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed: list[int] = []
    with monkeypatch.context() as patch:

        def broken(*_: object) -> None:
            failed.append(1)
            raise RuntimeError("a broken disk")

        patch.setattr(FileTail, "read", broken)
        stream = opened(port, token, "log:00aa00:0@0")
        until(lambda: len(failed) > 2)
        append(log, "a line\n")
    assert text_of(stream, "a line\n").endswith("a line\n")
    stream.close()
    assert caplog.text.count("cannot be looked at") == 1


def test_a_quiet_stream_gets_a_comment(port: int, token: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_QUIET_SECONDS", 0.2)
    stream = opened(port, token, "log:00aa00:0")
    until(lambda: stream.answer.readline() == b":\n")
    stream.close()


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
