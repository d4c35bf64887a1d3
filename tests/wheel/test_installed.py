"""ortlaunch from its wheel, in a folder outside the checkout: training, ready jobs, a cluster's script, compare."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ortlaunch

ROOT = Path(__file__).parents[2]
_SMALL = ("device=cpu", "train.steps=2", "train.log_every=1", "data.seq_len=32")
_NANO = tuple(f"model.params.{size}" for size in ("n_embd=32", "n_layer=1", "n_head=2"))


def test_it_is_the_wheel_that_runs(installed) -> None:
    assert installed.run("--version").stdout == f"ortlaunch {ortlaunch.__version__}\n"
    assert not Path(installed.value("ortlaunch.__file__")).is_relative_to(ROOT)
    assert installed.value("metadata.version('ortlaunch')") == ortlaunch.__version__


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
