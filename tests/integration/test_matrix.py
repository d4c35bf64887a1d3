"""Backends times trainers, on two real workers: each trains, says truly what computed it, and computes the same.

test_precision.py has each trainer for some steps, tests/numbers holds all of them against fp64, test_ready_jobs.py has
torch.compile.
"""

from __future__ import annotations

import math
import statistics

import pytest

from tests.integration.conftest import MATRIX, WHOLE


@pytest.mark.parametrize("name", WHOLE)
def test_trains_to_the_end(matrix, mlflow_run, name):
    """Exit code 0 without a word on standard error, FINISHED in journal and MLflow, which knows what computed it."""
    result = matrix[name]
    assert result.returncode == 0, result.report
    assert result.stderr == ""
    assert result.status == "FINISHED"
    run = mlflow_run(result)[1]
    assert run.info.status == "FINISHED"
    assert run.data.tags["ortlaunch.ort_active"] == ("true" if name.startswith("ort") else "false")


@pytest.mark.parametrize("name", WHOLE)
def test_workers_that_stay_compute_what_a_whole_run_computes(matrix, computed, name):
    """Guards the other tests, most of which have their runs trained by workers that stay."""
    for series in ("train/loss", "train/grad_norm", "train/lr"):
        # Not bit for bit: two processes may take another order of summing, on whichever cores they find.
        assert computed[name].series(series) == pytest.approx(matrix[name].series(series), rel=1e-5), series


@pytest.mark.parametrize("name", MATRIX)
def test_losses_fall(computed, name):
    result = computed[name]
    assert result.status == "FINISHED", result.report
    losses = list(result.losses.values())
    assert all(math.isfinite(loss) for loss in losses)
    assert statistics.mean(losses[-5:]) < 0.95 * statistics.mean(losses[:5])


@pytest.mark.parametrize("name", MATRIX)
def test_ort_is_called_active_exactly_where_it_ran(computed, name):
    tags = computed[name].tags
    assert tags["ortlaunch.ort_active"] == ("true" if name.startswith("ort") else "false")
    assert tags["ortlaunch.backend"] == name.partition("-")[0]
    assert tags["ortlaunch.world_size"] == "2"


def test_ort_computes_what_eager_computes(computed):
    """The same loss and gradient at each of 20 steps, of a language model: tests/numbers has small nets."""
    one, other = computed["ort-ddp"], computed["eager-ddp"]
    # Gradients by their norm before clipping: AdamW would hide one that is off by a factor.
    for name, tolerance in (("train/loss", {"abs": 1e-4}), ("train/grad_norm", {"rel": 1e-3})):
        expected = other.series(name)
        assert len(expected) == 20, name
        assert one.series(name) == pytest.approx(expected, **tolerance), name


def test_the_check_at_start_is_timed_and_says_nothing_of_a_sound_model(computed):
    result = computed["ort-ddp"]
    assert "ortlaunch.allowed" not in result.tags
    seconds = {metric: value for metric, _, value in result.points if metric.startswith("startup/")}
    assert seconds["startup/ort_check_seconds"] > 0
    assert not any(metric == "startup/ort_check_seconds" for metric, _, _ in computed["eager-ddp"].points)
