"""The proof's own arithmetic: which verdicts are false, what is drawn, what is kept, and what the docs say of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.bench_estimate import _result, _workers
from tests.benchmarks.estimate_draws import draw
from tests.benchmarks.estimate_record import FOLDER, Record, summary, table

WORDS = "model=mlp trainer=deepspeed trainer.zero_stage=1 backend=eager"


def result(low: int, peak: int, high: int, *measured: int) -> dict[str, Any]:
    peaks = {str(rank): one for rank, one in enumerate(measured)}
    return {"words": WORDS, "low": low, "peak": peak, "high": high, "measured": peaks}


@pytest.mark.parametrize(
    ("one", "above", "below", "false"),
    [
        (result(90, 100, 110, 50, 50), 0, 0, []),
        # "fits" under 90 % of what was measured.
        (result(60, 75, 85, 50, 50), 1, 0, [0.9]),
        # "does not fit" under all limits up to 125 %.
        (result(130, 140, 150, 50, 50), 0, 1, [1.0, 1.1, 1.25]),
        # False only under limits that are nearer than those.
        (result(60, 80, 95, 50, 50), 1, 0, []),
    ],
)
def test_a_verdict_is_false_by_what_was_measured(
    one: dict[str, Any], above: int, below: int, false: list[float]
) -> None:
    lines = summary([one])
    assert lines[-2].endswith(f": {above}")
    assert lines[-1].endswith(f": {below}")
    counts = {float(line.split()[0]): int(line.split()[-1]) for line in lines if " of the measured" in line}
    assert [limit for limit, count in counts.items() if count] == false
    assert any(line.startswith("| ZeRO 1 | 1 |") for line in lines)


def test_what_failed_is_not_judged() -> None:
    failed = {"words": WORDS, "failed": "no memory"}
    assert summary([failed, result(90, 100, 110, 100)])[0] == "1 runs judged, 0 not estimated, 1 not measured"


def test_every_family_trainer_and_backend_meets_each_other() -> None:
    drawn = [draw(0, number) for number in range(252)]
    met = {
        (words[0], next(word for word in words if word.startswith("backend=")), trainer)
        for words in drawn
        for trainer in [" ".join(word for word in words if word.startswith(("trainer=", "trainer.zero_stage")))]
    }
    # Without fsdp under ONNX Runtime, and without its ZeRO 3 for two families that have no repeated blocks.
    assert len(met) == 9 * 7 * 2 - 9 - 2
    assert {_workers(words) for words in drawn} == {1, 2, 3}
    assert drawn == [draw(0, number) for number in range(252)]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """A record of two configurations in a folder that is not there yet."""
    record = Record.of(tmp_path / "kept" / "seed0.jsonl")
    for number in (1, 0):
        record.keep({**result(60, 80, 95, 50), "number": number, "words": f"{WORDS} {number}"})
    return record


def test_a_result_takes_the_place_of_the_one_before(record: Record) -> None:
    record.keep({**result(70, 80, 95, 50), "number": 0, "words": f"{WORDS} 0", "measured_in": record.setup()})
    kept = [json.loads(line) for line in record.file.read_text().splitlines()]
    assert [one["number"] for one in kept[1:]] == [0, 1]
    assert kept[1]["low"] == 70
    assert "torch" in kept[0]["setups"][kept[1]["measured_in"]]["versions"]
    again = Record.of(record.file)
    assert (again.setups, again.results) == (record.setups, record.results)
    assert again.setup() == 0


def test_what_is_kept_is_not_measured_again(record: Record, tmp_path: Path) -> None:
    words = f"{WORDS} 0"
    assert _result(0, tuple(words.split()), record, tmp_path, "measure") is record.results[words]
    assert _result(7, ("model=mlp",), record, tmp_path, "again") is None


def test_the_docs_have_the_table_of_the_kept_records() -> None:
    kept = [one for seed in (0, 1) for one in Record.of(FOLDER / f"seed{seed}.jsonl").results.values()]
    judged = [one for one in kept if "peak" in one]
    assert {one["words"] for one in kept} == {
        " ".join(draw(seed, number)) for seed, count in ((0, 200), (1, 90)) for number in range(count)
    }
    text = (FOLDER.parents[2] / "docs" / "estimate.md").read_text()
    assert "\n".join(table(judged)) in text
    assert all(row.endswith("| 0 | 0 |") for row in table(judged)[2:])
