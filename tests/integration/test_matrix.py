"""Backends times trainers, on two real workers: each trains, says truly what computed it, and computes the same.

test_precision.py has each trainer for some steps, tests/numbers the referee, and test_ready_jobs.py torch.compile: CI
takes four runs here.
"""

from __future__ import annotations

import math
import statistics

import pytest

from tests.integration.conftest import MATRIX, WHOLE

IN_CI = ("eager-single", "eager-ddp", "eager-zero1", "ort-ddp")
EAGER = ["eager-single", "eager-ddp", "eager-zero1", "eager-zero2", "eager-zero3", "eager-fsdp"]
ORT = ["ort-ddp", "ort-zero1", "ort-zero2"]
ACCUMULATED = ["ort-ddp-accumulated", "ort-zero2-accumulated", "eager-fsdp-accumulated"]


def cases(names):
    return [pytest.param(name, marks=[pytest.mark.nightly] * (name not in IN_CI)) for name in names]


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


@pytest.mark.parametrize("name", cases([*EAGER, *ORT, *ACCUMULATED]))
def test_losses_fall(computed, name):
    result = computed[name]
    assert result.status == "FINISHED", result.report
    losses = list(result.losses.values())
    assert all(math.isfinite(loss) for loss in losses)
    assert statistics.mean(losses[-5:]) < 0.95 * statistics.mean(losses[:5])


@pytest.mark.parametrize("name", cases([*EAGER, *ORT, *ACCUMULATED]))
def test_ort_is_called_active_exactly_where_it_ran(computed, name):
    tags = computed[name].tags
    assert tags["ortlaunch.ort_active"] == ("true" if name.startswith("ort") else "false")
    assert tags["ortlaunch.backend"] == name.partition("-")[0]
    assert tags["ortlaunch.world_size"] == ("1" if name == "eager-single" else "2")


@pytest.mark.parametrize("name", cases(ORT))
def test_ort_computes_what_eager_computes(computed, name):
    """The same loss and gradient at each of 20 steps, under DDP and under DeepSpeed."""
    assert_same(computed[name], computed[name.replace("ort", "eager")])


@pytest.mark.parametrize("name", cases(EAGER[1:]))
def test_two_workers_compute_what_one_computes(computed, name):
    """Twice two samples make the steps of once four samples, however the workers share optimizer and weights."""
    assert_same(computed[name], computed["eager-single"])


@pytest.mark.nightly
def test_fsdp_computes_what_ddp_computes(computed):
    assert_same(computed["eager-fsdp"], computed["eager-ddp"])


@pytest.mark.nightly
def test_recomputed_activations_of_sharded_blocks_are_the_same(computed):
    """The blocks' parameters are gathered once more for it, within the backward."""
    assert_same(computed["eager-fsdp-recomputed"], computed["eager-fsdp"])


@pytest.mark.parametrize("name", cases(ACCUMULATED))
def test_accumulated_micro_batches_compute_what_one_batch_computes(computed, name):
    """Two micro-batches of one sample make the steps of one batch of two; DDP and DeepSpeed average alike."""
    assert_same(computed[name], computed[name.removesuffix("-accumulated")])


def assert_same(one, other):
    """Gradients too, by their norm before clipping: AdamW would hide a gradient that is off by a factor."""
    for name, tolerance in (("train/loss", {"abs": 1e-4}), ("train/grad_norm", {"rel": 1e-3})):
        expected = other.series(name)
        assert len(expected) == 20, name
        assert one.series(name) == pytest.approx(expected, **tolerance), name


def test_another_seed_computes_something_else(computed, train):
    """Guards the comparisons above: losses that agree mean something."""
    other = train(computed.folder, *MATRIX["eager-single"], "seed=1", "train.steps=2", "tracking=none")
    assert other.status == "FINISHED", other.report
    assert abs(other.losses[1] - computed["eager-single"].losses[1]) > 1e-3


def test_the_check_at_start_is_timed_and_says_nothing_of_a_sound_model(computed):
    result = computed["ort-ddp"]
    assert "ortlaunch.allowed" not in result.tags
    seconds = {metric: value for metric, _, value in result.points if metric.startswith("startup/")}
    assert seconds["startup/ort_check_seconds"] > 0
    assert not any(metric == "startup/ort_check_seconds" for metric, _, _ in computed["eager-ddp"].points)
