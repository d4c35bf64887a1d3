"""What workers print may hold secrets. No offset, length or word of a viewer shows more of them than the whole log."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from ortlaunch.run.run import Run
from ortlaunch.serve.follow import logs
from ortlaunch.serve.follow.logs import clean
from ortlaunch.serve.service import Service
from ortlaunch.serve.tails import LogTail
from tests.launch.follow.conftest import Maker

PASSWORD = "hunter2hunter2"
KEY_LINES = [
    f"MIIE{number:02}vQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9U{number:02}/" for number in range(20)
]
KEY = "\n".join(("-----BEGIN PRIVATE KEY-----", *KEY_LINES, "short4Last+Line==", "-----END PRIVATE KEY-----"))


@pytest.fixture
def log(service: Service, make_run: Maker) -> Path:
    run_dir = make_run("one", run_id="00aa00", steps=3)
    service.runs.refresh()
    return run_dir / "logs" / "rank-0.log"


def page(viewer: TestClient, **query: object) -> dict:
    answer = viewer.get("/api/runs/00aa00/logs/0", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(log: Path, position: int) -> str:
    """What a stream that begins at a byte shows of a log that has ended."""
    run = Run(log.parent.parent)
    tail, text = LogTail(run, log.relative_to(run.path), {}), ""
    while True:
        piece = tail.read(position, log.stat().st_size)
        if piece.content is None:
            return text
        text, position = text + piece.content["text"], piece.next


def everything(viewer: TestClient, log: Path, offset: int) -> str:
    """What a page, a stream and a search show from a byte on."""
    found = page(viewer, offset=offset, limit=4096)
    matches = page(viewer, offset=offset, search="h")["matches"] + page(viewer, offset=offset, search="m")["matches"]
    return "\n".join((found["text"], found["rest"], *(one["line"] for one in matches), streamed(log, offset)))


@pytest.mark.parametrize(
    "end", ["\nnext\n", "", "\r\nnext\n", f"{' x' * 3000}\nnext\n"], ids=["line", "rest", "crlf", "long"]
)
@pytest.mark.parametrize("name", ["db_password=", "password: ", "password:\n"], ids=["=", ":", "line"])
def test_an_offset_inside_a_secret_shows_nothing_of_it(viewer: TestClient, log: Path, name: str, end: str) -> None:
    log.write_bytes(f"first\n{name}{PASSWORD}{end}".encode())
    at = len(f"first\n{name}")
    for offset in (at - 2, at - 1, at, at + 1, at + 9):
        shown = everything(viewer, log, offset)
        assert "ter2" not in shown, offset
        assert ("next" in shown) is ("next" in end)


def test_an_offset_inside_a_private_key_shows_nothing_of_it(viewer: TestClient, log: Path) -> None:
    log.write_text(f"first\n{KEY}\nmore\n")
    for line in (*KEY_LINES[::6], "short4Last"):
        shown = everything(viewer, log, log.read_text().index(line))
        assert "MII" not in shown and "short4" not in shown
        assert "more" in shown


def test_a_live_stream_shows_nothing_of_a_key_that_spans_two_looks(log: Path) -> None:
    beginning, end = f"{KEY}\nmore\n".split(f"{KEY_LINES[7]}\n")
    log.write_text(f"{beginning}{KEY_LINES[7]}\n")
    position = log.stat().st_size
    assert "MII" not in streamed(log, 0)
    log.write_text(f"{beginning}{KEY_LINES[7]}\n{end}")
    assert streamed(log, position).replace("***\n", "") == "-----END PRIVATE KEY-----\nmore\n"


def test_a_search_finds_nothing_in_a_key_that_spans_two_blocks(
    viewer: TestClient, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_BLOCK", 256)
    log.write_text(f"first\n{KEY}\nmore\nMII is found\n")
    assert [one["line"] for one in page(viewer, search="mii")["matches"]] == ["MII is found"]


@pytest.mark.parametrize("limit", [4096, 4105, 4110])
def test_a_secret_at_the_place_where_a_line_is_cut_is_not_shown(viewer: TestClient, log: Path, limit: int) -> None:
    log.write_text(f"{'.' * 4079}\rhttps://ann:hunter2hunter2@host/ and more\n")
    assert "hunt" not in page(viewer, offset=0, limit=limit)["text"]
    assert "hunt" not in clean(f"{'.' * (limit - 128)} https://ann:hunter2hunter2@host/ {'.' * 9000}\n".encode())


def test_a_progress_bar_without_line_ends_is_shown_in_pieces(viewer: TestClient, log: Path) -> None:
    log.write_text("".join(f"\r{number} % done" for number in range(10_000)))
    for query in ({}, {"limit": 4096}, {"offset": 70_000, "limit": 80_000}):
        found = page(viewer, **query)
        assert (found["text"] or found["rest"]) in ("9998 % done", "9999 % done")


def test_a_line_of_many_blocks_is_shown_from_its_beginning_alone(viewer: TestClient, log: Path) -> None:
    log.write_text(f"begins{'x' * 300_000}\nnext\n")
    assert page(viewer, offset=0)["text"].startswith("beginsxxx")
    assert streamed(log, 0).startswith("beginsxxx")
    assert streamed(log, 0).endswith("…next\n")
