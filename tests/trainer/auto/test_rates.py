"""The cache of rates: what runs leave for each other, and what a hostile or damaged file can do."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from pathlib import Path

import pytest

from ortlaunch.base.locks import exclusive
from ortlaunch.trainer.auto.decision import BACKENDS, Near, Rate
from ortlaunch.trainer.auto.rates import Rates

FACTS = {"model": "mlp", "params": {"width": 8}}
REFUSED = {"ort": 0.5, "compile": 2.0}
"""Backends and how many days ago they refused."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path))
    return tmp_path


def entry(**changes: object) -> dict[str, object]:
    return {"step_seconds": 0.1, "start_seconds": 5.0, "time": time.time(), **changes}


def written(content: object) -> Rates:
    rates = Rates(FACTS)
    rates.path.parent.mkdir(exist_ok=True)
    rates.path.write_text(content if isinstance(content, str) else json.dumps(content))
    return rates


def test_what_is_noted_is_read_by_runs_of_the_same_kind_alone() -> None:
    Rates(FACTS).note("ort", Rate(0.05, 8.0))
    assert Rates(FACTS).read() == {"ort": Rate(0.05, 8.0)}
    assert Rates({**FACTS, "params": {"width": 9}}).read() == {}


def test_what_is_noted_is_near_for_runs_with_another_batch_or_other_data() -> None:
    def rates(batch: int, length: int = 8, **facts: object) -> Rates:
        train = {"batch_size": batch, "grad_accumulation": 2, "deterministic": False}
        return Rates({**FACTS, "train": train, "data": {"seq_len": length}, **facts})

    rates(4).note("ort", Rate(0.05, 8.0))
    assert rates(4).near() == []
    assert rates(8, 32).near() == [Near({"ort": Rate(0.05, 8.0)}, 8.0)]
    assert rates(8, params={"width": 9}).near() == []
    for damaged in ("no JSON", json.dumps({"backends": {"ort": entry()}}), json.dumps({"work": 0, "backends": {}})):
        rates(4).path.write_text(damaged)
        assert rates(8).near() == []


def test_a_start_that_was_not_measured_leaves_the_earlier_one() -> None:
    rates = Rates(FACTS)
    rates.note("eager", Rate(0.1, 5.0))
    rates.note("eager", Rate(0.2))
    assert rates.read() == {"eager": Rate(0.2, 5.0)}


def test_a_busy_machine_does_not_replace_what_an_idle_one_measured() -> None:
    rates = Rates(FACTS)
    rates.note("eager", Rate(0.3, 5.0), busy_percent=60.0)
    rates.note("eager", Rate(0.1, 5.0), busy_percent=1.0)
    rates.note("eager", Rate(0.4, 5.0), busy_percent=60.0)
    assert rates.read() == {"eager": Rate(0.1, 5.0)}
    rates.note("eager", Rate(unfit="the model is another one now"), busy_percent=60.0)
    assert rates.read()["eager"].unfit == "the model is another one now"


def test_old_rates_are_forgotten_and_unsure_ones_and_refusals_after_a_day() -> None:
    old = {"eager": entry(time=time.time() - 40 * 86400), "ort": entry(time=time.time() - 20 * 86400)}
    unsure = {"compile": entry(time=time.time() - 2 * 86400, busy_percent=100.0)}
    assert set(written({"backends": old | unsure}).read()) == {"ort"}
    refusals = {name: {"unfit": "no compiler", "time": time.time() - 86400 * age} for name, age in REFUSED.items()}
    assert set(written({"backends": refusals}).read()) == {"ort"}
    assert written({"backends": {"eager": entry(time=time.time() + 40 * 86400)}}).read() == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"step_seconds": -1.0},
        {"step_seconds": 0},
        {"step_seconds": "fast"},
        {"step_seconds": True},
        {"step_seconds": float("nan")},
        {"step_seconds": 1e300},
        {"start_seconds": []},
        {"tried_seconds": -5},
        {"time": None},
        {"time": "now"},
        {"time": 10**400},
        {"step_seconds": 10**400},
        {"unfit": ["x"]},
    ],
    ids=lambda changes: f"{changes}"[:40],
)
def test_an_entry_that_is_no_rate_counts_as_missing(changes: dict[str, object]) -> None:
    rates = written({"backends": {"ort": entry(**changes), "eager": entry()}})
    assert set(rates.read()) == {"eager"}


DAMAGED = {
    "empty": "",
    "torn": "{",
    "list": "[]",
    "number": '{"backends": 3}',
    "entry": '{"backends": {"ort": 3}}',
    "deep": "[" * 60_000,
    "unknown": '{"backends": {"cuda": {}}}',
    "large": " " * 70_000,
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file_counts_as_missing_and_is_written_anew(content: str) -> None:
    rates = written(content)
    assert rates.read() == {}
    rates.note("eager", Rate(0.1, 5.0))
    assert rates.read() == {"eager": Rate(0.1, 5.0)}


def test_a_damaged_entry_does_not_keep_others_from_being_noted() -> None:
    damaged = entry(step_seconds=float("nan"))
    rates = written({"backends": {"ort": damaged, "compile": entry(busy_percent=float("nan"), more=float("inf"))}})
    rates.note("eager", Rate(0.1, 5.0))
    assert rates.read() == {"eager": Rate(0.1, 5.0), "compile": Rate(0.1, 5.0)}
    assert set(json.loads(rates.path.read_text())["backends"]) == {"eager", "compile"}


def test_damaged_bytes_never_raise() -> None:
    draw = random.Random(3)
    good = json.dumps({"backends": {name: entry() for name in BACKENDS}}).encode()
    rates = written("")
    for _ in range(300):
        content = bytearray(good)
        for _ in range(draw.randint(1, 6)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        rates.path.write_bytes(content)
        assert all(rate.step_seconds is None or rate.step_seconds > 0 for rate in rates.read().values())


def test_a_reason_cannot_control_the_terminal() -> None:
    rates = written({"backends": {"ort": entry(unfit="bad\x1b[2J\nortlaunch: done" + "x" * 5000)}})
    reason = rates.read()["ort"].unfit
    assert reason.isprintable()
    assert len(reason) <= 200


def test_a_file_that_others_may_write_is_not_believed() -> None:
    rates = written({"backends": {"eager": entry()}})
    rates.path.chmod(0o666)
    assert rates.read() == {}


def test_a_folder_that_others_may_write_is_neither_read_nor_written() -> None:
    rates = written({"backends": {"eager": entry()}})
    rates.path.parent.chmod(0o777)
    assert rates.read() == {}
    before = rates.path.read_text()
    rates.note("ort", Rate(0.1, 1.0))
    assert rates.path.read_text() == before


def test_a_pipe_in_its_place_is_not_waited_for() -> None:
    rates = Rates(FACTS)
    rates.path.parent.mkdir()
    os.mkfifo(rates.path)
    assert rates.read() == {}


def test_a_run_that_writes_waits_for_another_and_keeps_what_it_has_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ortlaunch.trainer.auto.rates._LOCK_SECONDS", 600.0, raising=False)
    rates = written({"backends": {}})
    writer = threading.Thread(target=rates.note, args=("eager", Rate(0.1, 5.0)))
    with exclusive(rates.path.parent / ".lock") as is_held:
        assert is_held
        # The other run has read the file, and writes after this one would have.
        writer.start()
        writer.join(0.5)
        written({"backends": {"compile": entry()}})
    writer.join(600)
    assert set(rates.read()) == {"eager", "compile"}


def test_a_secret_among_the_facts_is_not_written(cache: Path) -> None:
    Rates({**FACTS, "data": {"token": "hf_abcdefghijklmnopqrstuvwxyz123456"}}).note("eager", Rate(0.1, 5.0))
    (path,) = (cache / "backend-rates").glob("*.json")
    assert "hf_" not in path.read_text()


def test_a_cache_that_cannot_be_written_stops_nothing(cache: Path) -> None:
    (cache / "backend-rates").write_text("a file in the folder's place")
    Rates(FACTS).note("eager", Rate(0.1, 5.0))
    assert Rates(FACTS).read() == {}
