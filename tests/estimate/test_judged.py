"""The proof's own arithmetic: which verdicts are false, what is drawn, and that an interruption loses one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import bench_estimate
from tests.benchmarks.bench_estimate import _read, _workers, summary
from tests.benchmarks.estimate_draws import draw

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
    assert any(line.startswith("deepspeed zero_stage=1 ") for line in lines)


def test_what_failed_is_not_judged() -> None:
    failed = {"words": WORDS, "failed": "no memory"}
    assert summary([failed, result(90, 100, 110, 100)])[0] == "1 runs judged, 1 refused or failed"


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


def test_a_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "record.jsonl"
    bench_estimate._keep(file, {"words": "one", "measured": {"0": 1}})
    with file.open("a") as stream:
        stream.write('{"words": "two", "meas')
    bench_estimate._keep(file, {"words": "one", "measured": {"0": 2}})
    assert _read(file) == {"one": {"words": "one", "measured": {"0": 2}}}
    assert json.loads(file.read_text().splitlines()[0])["measured"] == {"0": 1}
