"""A real bench: two cells, two rounds, a comparison with intervals, its page, and its record in MLflow."""

from __future__ import annotations

import json

SMALL = ("model=mlp", "backend=eager", "trainer=single", "train.steps=6", "train.log_every=1")


def test_a_bench_ends_in_its_comparison(launch, tmp_path):
    words = ("train.batch_size=4,8", "repeat=2", "train.checkpoint_every=null", "--html", "bench.html", "--log")
    result = launch(tmp_path, "bench", *SMALL, *words)
    assert result.returncode == 0, result.report
    assert "4/4  round 2 of 2: mlp-eager-single-batch_size=8" in result.stdout
    assert "against mlp-eager-single-batch_size=4; means of repeats" in result.stdout
    assert (tmp_path / "bench.html").read_text().count('"values":') == 12, "throughput, memory and loss of four runs"
    (logged,) = tmp_path.glob("mlartifacts/**/comparison.json")
    document = json.loads(logged.read_text())
    groups = document["groups"]
    assert [(group["group"], group["seeds"]) for group in groups] == [
        ("mlp-eager-single-batch_size=4", ["0", "1"]),
        ("mlp-eager-single-batch_size=8", ["0", "1"]),
    ]
    assert all(group["samples_per_second_median"]["interval_95"] for group in groups)
    assert groups[1]["speedup"]["interval_95"]
    assert any("train.batch_size" in warning for warning in document["warnings"])
    assert not list(tmp_path.glob("runs/*/*/weights"))
