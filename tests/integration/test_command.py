"""The command around its runs: sweeps, dry runs, comparisons, and a launcher that stays light."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ortlaunch

HEAVY = ("torch", "transformers", "mlflow", "deepspeed", "onnxruntime")


@pytest.fixture(scope="module")
def sweep(launch, tmp_path_factory):
    words = ("--multirun", "backend=eager,ort", "model=mlp", "train.steps=20", "train.log_every=5")
    return launch(tmp_path_factory.mktemp("sweep"), *words)


def test_multirun_runs_every_combination(sweep):
    assert sweep.returncode == 0, sweep.report
    assert sweep.stdout.count("finished after") == 2
    backends = ["eager" if "-eager-" in run_dir.name else "ort" for run_dir in sweep.run_dirs]
    assert backends == ["eager", "ort"]
    made = {path for path in sweep.cwd.glob("runs/*/*") if not path.name.startswith("multirun")}
    assert made == set(sweep.run_dirs)


def test_compare_lists_eager_and_ort_with_the_speed_up(sweep, launch):
    eager, ort = map(str, sweep.run_dirs)
    result = launch(sweep.cwd, "compare", eager, ort, "--format", "json")
    assert result.returncode == 0, result.report
    rows = {row["backend"]: row for row in json.loads(result.stdout)["runs"]}
    assert rows.keys() == {"eager", "ort"}
    assert rows["eager"]["ort_active"] is False
    assert rows["ort"]["ort_active"] is True
    rate = "samples_per_second_median"
    assert rows["ort"]["speedup"] == pytest.approx(rows["ort"][rate] / rows["eager"][rate])
    assert rows["eager"]["speedup"] == 1


def test_compare_without_arguments_is_a_table_of_the_runs(sweep, launch):
    result = launch(sweep.cwd, "compare")
    assert result.returncode == 0, result.report
    words = " ".join(result.stdout.split())
    for column in ("run", "id", "model", "backend", "ort active", "trainer", "status", "samples", "p50", "p95", "peak"):
        assert all(word in words for word in column.split()), column
    lines = result.stdout.splitlines()
    assert any("mlp-eager-ddp" in line and "false" in line and "FINISHED" in line for line in lines)
    assert any("mlp-ort-ddp" in line and "true" in line and "FINISHED" in line for line in lines)


def test_compare_without_a_store_says_so_and_makes_none(launch, tmp_path):
    result = launch(tmp_path, "compare")
    assert result.returncode == 2, result.report
    assert "mlruns.db" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_prints_the_command_and_writes_nothing(launch, tmp_path):
    result = launch(tmp_path, "model=gpt2", "trainer=deepspeed", "launcher.dry_run=true")
    assert result.returncode == 0, result.report
    assert "torch.distributed.run" in result.stdout
    assert "--nproc-per-node=2" in result.stdout
    assert str(tmp_path / "runs") in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["--cfg", "job"], 0),
        (["models"], 0),
        (["model=gpt2", "launcher.dry_run=true"], 0),
        (["trainer=deepspeed", "trainer.zero_stage=2", "backend.zero3=hold"], 2),
        (["train.stepz=3"], 2),
        (["model=gtp2"], 2),
        (["compare"], 2),
    ],
    ids=str,
)
def test_the_launcher_stays_light(tmp_path, arguments, code):
    """Answers that need no training import none of the libraries that take seconds."""
    program = (
        "import sys\n"
        "from ortlaunch.cli import main\n"
        f"sys.argv = ['ortlaunch', *{arguments!r}]\n"
        "try:\n    main()\n"
        "finally:\n"
        f"    print('imported:', *sorted({{*{HEAVY!r}}} & sys.modules.keys()), file=sys.stderr)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(ortlaunch.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines()[-1] == "imported:"
