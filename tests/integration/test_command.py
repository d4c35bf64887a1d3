"""The command around its runs: sweeps and comparisons. `sweep` is in conftest.py."""

from __future__ import annotations

import json

import pytest


def test_multirun_runs_every_combination(sweep):
    assert sweep.returncode == 0, sweep.report
    assert sweep.stdout.count("finished after") == 2
    backends = ["eager" if "-eager-" in run_dir.name else "ort" for run_dir in sweep.run_dirs]
    assert backends == ["eager", "ort"]
    made = {path for path in sweep.cwd.glob("runs/*/*") if not path.name.startswith("multirun")}
    assert made == set(sweep.run_dirs)


def test_compare_lists_eager_and_ort_with_the_speed_up(sweep, ask):
    eager, ort = map(str, sweep.run_dirs)
    result = ask(sweep.cwd, "compare", eager, ort, "--format", "json")
    assert result.returncode == 0, result.stderr
    rows = {row["backend"]: row for row in json.loads(result.stdout)["runs"]}
    assert rows.keys() == {"eager", "ort"}
    assert rows["eager"]["ort_active"] is False
    assert rows["ort"]["ort_active"] is True
    rate = "samples_per_second_median"
    assert rows["ort"]["speedup"] == pytest.approx(rows["ort"][rate] / rows["eager"][rate])
    assert rows["eager"]["speedup"] == 1


def test_compare_without_arguments_is_a_table_of_the_runs(sweep, ask):
    result = ask(sweep.cwd, "compare")
    assert result.returncode == 0, result.stderr
    words = " ".join(result.stdout.split())
    for column in ("run", "id", "model", "backend", "ort active", "trainer", "status", "samples", "p50", "p95", "peak"):
        assert all(word in words for word in column.split()), column
    lines = result.stdout.splitlines()
    assert any("mlp-eager-ddp" in line and "false" in line and "FINISHED" in line for line in lines)
    assert any("mlp-ort-ddp" in line and "true" in line and "FINISHED" in line for line in lines)


def test_compare_without_a_store_says_so_and_makes_none(ask, tmp_path):
    result = ask(tmp_path, "compare")
    assert result.returncode == 2, result.stderr
    assert "mlruns.db" in result.stderr
    assert list(tmp_path.iterdir()) == []
