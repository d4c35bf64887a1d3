"""Drawn runs compute what one process computes in fp64 by plain torch: losses, norms, learning rates, final weights."""

from __future__ import annotations

import pytest

from tests.numbers.draws import OWN, draw
from tests.numbers.judge import judged
from tests.support.nightly import first_in_ci

# Each process would start workers of its own.
pytestmark = pytest.mark.xdist_group("numbers")


# Together nearly each part under each kind of trainer, also resumed, evaluated and accumulated.
IN_CI = (3, 51, 140, 211, 229, 173, 50, 146, 47, 103, 88, 144, 72, 101, 135, 1, 33, 110, 151, 178)
SEEDS = [*IN_CI, *(seed for seed in range(240) if seed not in IN_CI)]


@pytest.mark.parametrize("one", first_in_ci([draw(seed) for seed in SEEDS], len(IN_CI)), ids=str)
def test_drawn_runs_in_eager_pytorch(one, tmp_path, pools):
    assert judged(one, tmp_path, pools) == ""


@pytest.mark.parametrize("one", first_in_ci([draw(seed, kinds=OWN) for seed in range(40)], 6), ids=str)
def test_drawn_runs_on_nested_data_of_their_own_with_uneven_ends(one, tmp_path, pools):
    assert judged(one, tmp_path, pools) == ""


@pytest.mark.ort
@pytest.mark.parametrize("one", first_in_ci([draw(seed, ("ort",), OWN) for seed in range(20)], 2), ids=str)
def test_the_same_under_onnx_runtime(one, tmp_path, pools):
    assert judged(one, tmp_path, pools) == ""


@pytest.mark.ort
@pytest.mark.parametrize("one", first_in_ci([draw(seed, ("ort",)) for seed in range(60)], 5), ids=str)
def test_drawn_runs_under_onnx_runtime(one, tmp_path, pools):
    assert judged(one, tmp_path, pools) == ""


@pytest.mark.nightly
@pytest.mark.parametrize("one", [draw(seed, ("compile",)) for seed in range(20)], ids=str)
def test_drawn_runs_under_torch_compile(one, tmp_path, pools):
    assert judged(one, tmp_path, pools) == ""
