"""The cache of rates: what runs leave for each other, and what a hostile or damaged file can do."""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ortlaunch.run import rates
from ortlaunch.run.rates import Rate

KIND = {"model": "mlp", "params": {"width": 8}}
GOOD = Rate(0.1, 5.0)
DAY = 86400.0


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path))
    return tmp_path


def entry(age: float = 0.0, **changes: object) -> dict[str, object]:
    known = {"step_seconds": 0.1, "start_seconds": 5.0, "unfit": "", "is_sure": True, "time": time.time() - age}
    return {**known, **changes}


def written(content: object, folder: Path) -> Path:
    rates.note(KIND, "eager", GOOD, is_sure=True)
    (path,) = (folder / "backend-rates").iterdir()
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_what_is_noted_is_read_by_runs_of_the_same_kind_alone() -> None:
    rates.note(KIND, "ort", Rate(0.05, 8.0), is_sure=True)
    assert rates.read(KIND) == {"ort": Rate(0.05, 8.0)}
    assert rates.read({**KIND, "params": {"width": 9}}) == {}


def test_runs_that_end_at_the_same_moment_lose_no_rate() -> None:
    with ThreadPoolExecutor(3) as pool:
        for number in range(20):
            kind, begin = {**KIND, "number": number}, threading.Barrier(3)

            def note(backend: str, kind: dict[str, object] = kind, begin: threading.Barrier = begin) -> None:
                begin.wait(120)
                rates.note(kind, backend, GOOD, is_sure=True)

            list(pool.map(note, ("eager", "compile", "ort")))
            assert len(rates.read(kind)) == 3


def test_a_busy_machine_does_not_replace_what_an_idle_one_measured() -> None:
    for step, is_sure in ((0.3, False), (0.1, True), (0.4, False)):
        rates.note(KIND, "eager", Rate(step, 5.0), is_sure=is_sure)
    assert rates.read(KIND) == {"eager": GOOD}


def test_old_rates_are_forgotten_and_unsure_ones_and_refusals_after_a_day(cache: Path) -> None:
    kept = {"eager": entry(20 * DAY), "compile": entry(0.5 * DAY, is_sure=False), "ort": entry(unfit="no compiler")}
    written({"backends": kept}, cache)
    assert list(rates.read(KIND)) == ["eager", "compile", "ort"]
    lost = {"eager": entry(40 * DAY), "compile": entry(2 * DAY, is_sure=False), "ort": entry(-40 * DAY)}
    written({"backends": lost}, cache)
    assert rates.read(KIND) == {}
    rates.note(KIND, "ort", Rate(unfit="no\x1b[2J\ncompiler" + "x" * 5000), is_sure=True)
    (path,) = (cache / "backend-rates").iterdir()
    stored = json.loads(path.read_text())["backends"]["ort"]
    assert stored["is_sure"] is False
    assert stored["unfit"].isprintable()
    assert len(stored["unfit"]) == 200


DAMAGED = {
    **{name: {name: value} for name, value in (("step_seconds", "fast"), ("start_seconds", []), ("unfit", ["x"]))},
    **{f"step {value}"[:12]: {"step_seconds": value} for value in (0, -1.0, float("nan"), 10**400)},
    **{f"time {value}"[:12]: {"time": value} for value in (None, "now", float("nan"), 10**400)},
}


@pytest.mark.parametrize("changes", DAMAGED.values(), ids=DAMAGED.keys())
def test_an_entry_that_is_no_rate_counts_as_missing(cache: Path, changes: dict[str, object]) -> None:
    written({"backends": {"ort": entry(**changes), "eager": entry()}}, cache)
    assert set(rates.read(KIND)) == {"eager"}


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"backends": 3}', '{"backends": {"ort": 3}}', "[" * 60_000, " " * 70_000],
    ids=["empty", "torn", "list", "number", "entry", "deep", "large"],
)
def test_a_damaged_file_counts_as_missing_and_is_written_anew(cache: Path, content: str) -> None:
    written(content, cache)
    assert rates.read(KIND) == {}
    rates.note(KIND, "eager", GOOD, is_sure=True)
    assert rates.read(KIND) == {"eager": GOOD}


def test_what_others_may_write_is_neither_believed_nor_waited_for(cache: Path) -> None:
    path = written({"backends": {"eager": entry()}}, cache)
    path.chmod(0o666)
    assert rates.read(KIND) == {}
    path.chmod(0o600)
    path.parent.chmod(0o777)
    assert rates.read(KIND) == {}
    before = path.read_text()
    rates.note(KIND, "ort", GOOD, is_sure=True)
    assert path.read_text() == before
    path.parent.chmod(0o700)
    path.unlink()
    os.mkfifo(path)
    assert rates.read(KIND) == {}


def test_a_secret_of_the_kind_is_not_written_and_a_cache_that_is_none_stops_nothing(cache: Path) -> None:
    kind = {**KIND, "data": {"token": "hf_abcdefghijklmnopqrstuvwxyz123456"}}
    rates.note(kind, "eager", GOOD, is_sure=True)
    (path,) = (cache / "backend-rates").iterdir()
    assert "hf_" not in path.read_text()
    path.unlink()
    path.parent.rmdir()
    path.parent.write_text("a file in the folder's place")
    rates.note(kind, "eager", GOOD, is_sure=True)
    assert rates.read(kind) == {}
