"""A run root whose file server hangs: its runs cannot be read, and those of other roots can."""

from __future__ import annotations

import asyncio
import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.run.run import Run
from ortlaunch.serve import command
from ortlaunch.serve.access import Role
from ortlaunch.serve.readers import Readers
from ortlaunch.serve.settings import Settings
from ortlaunch.serve.unfit import Unavailable
from tests.launch.follow.conftest import Maker
from tests.serve.follow.live import listening, opened
from tests.support.dead_mount import dead
from tests.support.service import InProcess, in_process
from tests.support.waiting import PATIENCE, until

ASKED = 48
"""More requests than the service has threads for all that is not told apart."""


@pytest.fixture
def far(tmp_path: Path) -> Path:
    return tmp_path / "far"


@pytest.fixture
def served(tmp_path: Path, far: Path, make_run: Maker, alive: dict[str, Any]) -> InProcess:
    make_run("near", run_id="00aa00", end=None, launcher=alive)
    Maker(far)("away", run_id="00bb00", end=None)
    return in_process(tmp_path / "runs", further_roots=(far,))


def get(port: int, token: dict[str, str], path: str, seconds: float = PATIENCE) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    connection.request("GET", path, headers=token)
    return connection.getresponse()


@contextmanager
def waiting(port: int, token: dict[str, str], path: str, count: int) -> Iterator[None]:
    """Keeps so many requests open that nobody answers."""
    connections = [http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE) for _ in range(count)]
    try:
        for one in connections:
            one.request("GET", path, headers=token)
        yield
    finally:
        for one in connections:
            one.close()


def test_a_root_that_hangs_holds_up_no_other_and_not_the_end_of_the_service(
    served: InProcess, far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ortlaunch.serve.index.indexer._STOP_SECONDS", 0.2, raising=False)
    token = served.token("vera", Role.viewer)
    near = next((tmp_path / "runs" / "default").iterdir())
    served.service.runs.refresh()
    with dead(far), listening(served) as port, waiting(port, token, "/api/runs/00bb00/metrics", ASKED):
        away = [opened(port, token, "log:00bb00:0,run:00bb00") for _ in range(6)]
        # The curves and the log of another run, and the list, which has the row of a step that comes now.
        assert get(port, token, "/api/runs/00aa00/metrics").status == 200
        stream = opened(port, token, "log:00aa00:0@0,list")
        with (near / "logs" / "rank-0.log").open("a") as log:
            log.write("a line\n")
        assert stream.until("log")[0].data["text"].endswith("a line\n")
        with Run(near).journal() as journal:
            journal.metrics(107, {"train/loss": 1.5})
        # What the first look has found comes before it.
        while ("00aa00", 107) not in [(row["run_id"], row["step"]) for row in stream.until("list")[0].data["rows"]]:
            pass
        for one in away:
            one.close()
        # Who has left counts no more, though the thread that reads for them still waits.
        until(lambda: served.service.streams.count == 1)
        stream.close()


def test_pages_say_which_root_hangs(served: InProcess, far: Path) -> None:
    viewer = served.client(served.token("vera", Role.viewer))
    runs = served.service.runs
    runs.refresh()
    assert "were last looked at" not in viewer.get("/").text
    late = next(one for one in runs.roots if one.root == far)
    late._looked_at -= 3700
    for path in ("/", "/queue"):
        text = viewer.get(path).text
        assert f'below <span class="code">{far}</span> were last looked at 1 h 1 min ago' in text
        assert text.count("were last looked at") == 1
    runs.refresh()
    assert "were last looked at" not in viewer.get("/").text


def test_a_request_to_a_root_that_hangs_is_answered_and_the_next_ones_at_once(tmp_path: Path) -> None:
    gate = threading.Event()

    async def ask() -> list[str]:
        readers = Readers(most=2)
        said = []

        async def one(place: str) -> None:
            try:
                said.append(str(await readers.call(f"{tmp_path}/{place}/e/run", gate.wait, PATIENCE, seconds=0.2)))
            except Unavailable as error:
                said.append(str(error))

        await asyncio.gather(*(one("far") for _ in range(4)))
        (threads,) = readers._threads.values()
        while threads.stuck_for() <= 0.2:
            await asyncio.sleep(0.01)
        # At once: no thread is asked to do it.
        asked = list(threads._waiting)
        await one("far")
        assert list(threads._waiting) == asked
        said.append(await readers.call(f"{tmp_path}/near/e/run", str, "near", seconds=PATIENCE))
        gate.set()
        while True:
            # Its threads are there again once the server answers.
            try:
                return [*said, await readers.call(f"{tmp_path}/far/e/run", str, "back", seconds=0.2)]
            except Unavailable:
                await asyncio.sleep(0.01)

    said = asyncio.run(ask())
    assert all(f"the run root {tmp_path}/far does not answer" in one for one in said[:5])
    assert said[5:] == ["near", "back"]


def test_a_root_below_another_one_is_looked_at_by_itself(tmp_path: Path, make_run: Maker) -> None:
    make_run("above")
    Maker(tmp_path / "runs" / "old")("below")
    served = in_process(tmp_path / "runs", further_roots=(tmp_path / "runs" / "old",))
    for _ in range(2):
        served.service.runs.refresh()
    viewer = served.client(served.token("vera", Role.viewer))
    assert sorted(row["name"] for row in viewer.get("/api/runs").json()["runs"]) == ["above", "below"]


def test_runs_of_a_root_that_is_not_named_any_more_are_forgotten(served: InProcess, tmp_path: Path) -> None:
    served.service.runs.refresh()
    again = in_process(tmp_path / "runs")
    again.service.runs.start()
    again.service.runs.stop()
    viewer = again.client(again.token("vera", Role.viewer))
    assert [row["name"] for row in viewer.get("/api/runs").json()["runs"]] == ["near"]


def test_the_service_starts_beside_a_root_that_hangs(
    far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    far.mkdir()
    monkeypatch.setattr(command, "_ROOT_SECONDS", 0.2)
    with dead(far):
        command.check(Settings(root=tmp_path / "runs", further_roots=(far,)))
    assert f"--root {far} does not answer" in capsys.readouterr().out
