"""A real bench: a cell that fails, one that is repeated, the comparison, and its page; without MLflow."""

from __future__ import annotations

import json

SMALL = (
    "model=mlp",
    "backend=eager",
    "trainer=single",
    "train.steps=6",
    "train.log_every=1",
    "train.checkpoint_every=null",
    "tracking=none",
)
# With the second learning rate no step is survived.
RATES = ("optimizer=sgd", "train.clip_grad_norm=null", "optimizer.lr=1e30,0.01")


def test_a_bench_ends_in_its_comparison(launch, tmp_path):
    result = launch(tmp_path, "bench", *SMALL, *RATES, "repeat=2", "--html", "bench.html")
    assert result.returncode == 1, result.report
    assert "mlp-eager-single-lr=1e+30 failed: exit code 1 in round 1" in result.stderr
    assert "3/3  round 2 of 2: mlp-eager-single-lr=0.01" in result.stdout
    assert "against mlp-eager-single-lr=0.01; means of repeats" in result.stdout
    page = (tmp_path / "bench.html").read_text()
    assert page.count('"label":') == 3 and "Throughput (samples/s)" in page
    (sweep,) = tmp_path.glob("runs/*/multirun-*")
    compared = launch(tmp_path, "compare", "--sweep", str(sweep), "--format", "json")
    failed, repeated = json.loads(compared.stdout)["groups"]
    assert (failed["status"], failed["speedup"]) == ("FAILED", None)
    assert (repeated["group"], repeated["seeds"]) == ("mlp-eager-single-lr=0.01", ["0", "1"])
    assert repeated["baseline"] and repeated["samples_per_second_median"]["interval_95"]
    assert not list(tmp_path.glob("runs/*/*/weights"))
