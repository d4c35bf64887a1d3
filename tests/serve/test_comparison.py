"""Who reads a comparison, and how many runs it takes. No children: see `FakeActor`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ortlaunch.serve.access import Role
from ortlaunch.serve.actor import own_user
from ortlaunch.serve.limits import MOST_COMPARED
from tests.launch.follow.conftest import Maker
from tests.serve.queue.fake_actor import FakeActor
from tests.support.service import InProcess, in_process

IDS = "00aa00,00bb00"


@pytest.fixture
def inside(tmp_path: Path, make_run: Maker) -> Iterator[InProcess]:
    for run_id in IDS.split(","):
        make_run(run_id=run_id)
    made = in_process(tmp_path / "runs")
    made.service.actor = FakeActor()  # type: ignore[assignment]
    made.service.runs.refresh()
    yield made
    made.service.engine.dispose()


@pytest.mark.parametrize(
    ("unix_user", "reader"), [("bernd", "bernd"), (None, own_user()), ("stranger", own_user())], ids=str
)
@pytest.mark.parametrize("path", ["/api/compare", "/compare/tables"])
def test_it_is_read_by_the_unix_user_of_who_asks(
    inside: InProcess, path: str, unix_user: str | None, reader: str
) -> None:
    client = inside.client(inside.token("bob", Role.viewer, unix_user))
    assert client.get(path, params={"ids": IDS}).status_code == 200
    [(asked_as, action, request)] = inside.service.actor.calls
    assert (asked_as, action) == (reader, "compare")
    assert [Path(one).name[-6:] for one in request["run_dirs"]] == IDS.split(",")


@pytest.mark.parametrize(
    "ids", ["00aa00", "00aa00,00aa00,", ",".join(f"{one:06x}" for one in range(MOST_COMPARED + 1))]
)
@pytest.mark.parametrize("path", ["/api/compare", "/compare/tables", "/compare"])
def test_it_takes_two_runs_and_no_more_than_fit(inside: InProcess, path: str, ids: str) -> None:
    answer = inside.client(inside.token("bob", Role.viewer)).get(path, params={"ids": ids})
    assert f"choose 2 to {MOST_COMPARED} runs to compare" in answer.text
    assert not inside.service.actor.calls


def test_runs_of_one_name_are_told_apart_by_their_ids(inside: InProcess) -> None:
    page = inside.client(inside.token("bob", Role.viewer)).get("/compare", params={"ids": IDS}).text
    assert "gpt2-ort-ddp (00aa00)" in page and "gpt2-ort-ddp (00bb00)" in page
