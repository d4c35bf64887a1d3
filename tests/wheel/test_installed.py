"""ortlaunch from its wheel, in a folder outside the checkout: training, ready jobs, a cluster's script, compare."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ortlaunch
from tests.wheel.conftest import FULL, Installed

ROOT = Path(__file__).parents[2]
_SMALL = ("device=cpu", "train.steps=2", "train.log_every=1", "data.seq_len=32")
_NANO = tuple(f"model.params.{size}" for size in ("n_embd=32", "n_layer=1", "n_head=2"))


def test_it_is_the_wheel_that_runs(installed) -> None:
    assert installed.run("--version").stdout == f"ortlaunch {ortlaunch.__version__}\n"
    assert not Path(installed.value("ortlaunch.__file__")).is_relative_to(ROOT)
    assert installed.value("metadata.version('ortlaunch')") == ortlaunch.__version__


@pytest.mark.skipif(not FULL, reason="installs every package anew: make test-wheel")
def test_the_smallest_installation_trains_compares_and_names_the_extra_of_a_key(wheel, tmp_path) -> None:
    """Without any extra: no ONNX Runtime, no DeepSpeed."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=120)
    (tmp_path / "work").mkdir()
    smallest = Installed(tmp_path / "venv/bin/python", tmp_path / "work")
    pip = [smallest.python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel]
    subprocess.run(pip, check=True, timeout=1200)
    for words in (_SMALL, (*_SMALL, "trainer=fsdp")):
        ran = smallest.run(*words)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    assert smallest.run("compare").stdout.count("FINISHED") == 2
    for words, extra in ((("trainer=deepspeed",), "deepspeed"), (("backend=ort",), "ort"), (("serve",), "serve")):
        refused = smallest.run(*words)
        assert refused.returncode == 2 and f"ortlaunch[{extra}]" in refused.stderr, refused.stderr


@pytest.mark.nightly
def test_training_a_ready_job_and_compare(installed) -> None:
    ready = installed.run("+jobs=gpt2_zero1_ort", "experiment=default", *_SMALL, *_NANO)
    assert ready.returncode == 0, ready.stdout + ready.stderr
    compared = installed.run("compare", "--format", "markdown")
    assert compared.returncode == 0, compared.stderr
    assert "gpt2-ort-deepspeed-z1" in compared.stdout
    assert "FINISHED" in compared.stdout and "FAILED" not in compared.stdout
    shutil.rmtree(installed.folder / "runs")


def test_what_can_be_named_is_listed(installed) -> None:
    assert "gpt2_zero2_ort" in installed.run("jobs", "--available").stdout
    assert "resnet" in installed.run("models", "--available").stdout


def test_a_job_for_a_cluster_is_shown(installed) -> None:
    shown = installed.run("+jobs=gpt2_slurm", "device=cpu", "launcher/slurm_profile=example", "launcher.dry_run=true")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("#!/bin/bash") and "#SBATCH --nodes=2" in shown.stdout
    # It runs the environment's own Python on the nodes.
    assert str(installed.python.parent) in shown.stdout
    assert str(ROOT) not in shown.stdout
