"""How far two results are apart, and what JSON and the page make of it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ortlaunch.check.cost import pays_off_after
from ortlaunch.check.report import Parity, Report, Structure, to_json
from ortlaunch.ort.verify.compare import compare, compare_with_exact, relative_error
from ortlaunch.ort.verify.comparison import TensorComparison


def test_the_error_is_relative_to_the_largest_value() -> None:
    expected = torch.tensor([10.0, 0.0, -20.0])
    assert relative_error(expected + torch.tensor([0.0, 1.0, 0.0]), expected) == pytest.approx(0.05)
    assert relative_error(expected.clone(), expected) == 0.0


def test_a_tensor_that_is_nearly_zero_is_measured_by_its_group() -> None:
    noise = {"large": torch.tensor([1.0]), "rounding": torch.tensor([1e-9])}
    other = {"large": torch.tensor([1.0]), "rounding": torch.tensor([-1e-9])}
    assert compare(other, noise).ok
    assert not compare({**other, "rounding": torch.tensor([1e-5])}, noise).ok


class Largest(TorchDispatchMode):
    """Measures the largest memory that an operator takes for its results."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)}
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


def test_a_comparison_takes_little_memory_beside_the_gradients() -> None:
    ours = {"large": torch.randn(3000, 1500)}
    theirs = {name: tensor.clone() for name, tensor in ours.items()}
    with Largest() as largest:
        assert compare(ours, theirs).ok
    assert 0 < largest.bytes <= ours["large"].nbytes / 4


@pytest.mark.parametrize("place", [0, -1], ids=["first part", "last part"])
def test_an_error_counts_wherever_it_is(place: int) -> None:
    expected = torch.ones(3_000_000)
    actual = expected.clone()
    actual[place] = 1.5
    assert relative_error(actual, expected) == 0.5
    expected[place] = math.nan
    assert relative_error(actual, expected) is None
    actual[place] = math.nan
    assert relative_error(actual, expected) == 0.0


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (torch.zeros(2), torch.zeros(3)),
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0])),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, math.nan])),
        (torch.tensor([1.0, math.inf]), torch.tensor([1.0, -math.inf])),
    ],
    ids=["shape", "integers", "nan here", "nan there", "another infinity"],
)
def test_what_has_no_error_in_numbers_is_different(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert relative_error(actual, expected) is None
    assert [one.name for one in compare({"x": actual}, {"x": expected}).differing] == ["x"]


def test_infinities_and_nan_in_the_same_places_are_no_difference() -> None:
    values = torch.tensor([1.0, -math.inf, math.nan])
    assert relative_error(values.clone(), values) == 0.0


def test_the_largest_error_and_every_difference_are_named() -> None:
    expected = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2), "d": torch.ones(2)}
    actual = {"a": torch.ones(2), "b": torch.full((2,), 1.5), "c": torch.full((2,), 1.1)}
    found = compare(actual, expected)
    assert (found.count, found.largest, found.largest_error) == (4, "b", pytest.approx(0.5))
    # What is missing comes first, then by error.
    assert [one.name for one in found.differing] == ["d", "b", "c"]


def test_tolerance_goes_by_dtype() -> None:
    def moved(dtype: torch.dtype) -> TensorComparison:
        return compare({"x": torch.tensor([1.01], dtype=dtype)}, {"x": torch.tensor([1.0], dtype=dtype)})

    assert not moved(torch.float32).ok
    assert moved(torch.float16).ok


def test_a_changed_dtype_is_a_difference_of_its_own() -> None:
    found = compare({"x": torch.ones(2)}, {"x": torch.ones(2, dtype=torch.float16)})
    assert found.differing == []
    assert found.dtypes == {"x": ["float16", "float32"]}
    assert not found.ok


@pytest.mark.parametrize(
    ("ort", "eager", "is_rounding"),
    [(1.01, 0.99, True), (1.04, 0.99, True), (1.06, 0.99, False), (1.01, 1.0, False), (math.nan, 0.99, False)],
)
def test_fp64_decides_whether_a_difference_is_rounding(ort: float, eager: float, is_rounding: bool) -> None:
    exact = {"x": torch.tensor([1.0], dtype=torch.float64)}
    found = compare_with_exact({"x": torch.tensor([ort])}, {"x": torch.tensor([eager])}, exact)
    assert found.ok is is_rounding
    assert found.eager_from_exact == pytest.approx(1 - eager)
    assert found.from_exact == (None if math.isnan(ort) else pytest.approx(ort - 1))


def test_without_fp64_every_difference_counts() -> None:
    found = compare_with_exact({"x": torch.tensor([1.01])}, {"x": torch.tensor([0.99])}, None)
    assert (found.ok, found.from_exact) == (False, None)


@pytest.mark.parametrize(
    ("export", "eager", "ort", "steps"),
    [(10.0, 1.0, 0.5, 21), (10.0, 0.5, 1.0, None), (10.0, 1.0, 1.0, None), (None, 1.0, 0.5, None)],
)
def test_the_export_pays_for_itself_by_what_it_saves_per_step(
    export: float | None, eager: float, ort: float, steps: int | None
) -> None:
    assert pays_off_after(export, eager, ort) == steps


def test_json_has_no_infinities_and_every_key() -> None:
    parity = Parity("failed", loss=TensorComparison(1, largest_error=math.inf))
    report = Report(False, "no", "m", "d", "cpu", "fp32", {}, Structure("ok"), parity=parity)
    text = json.dumps(to_json(report), allow_nan=False)
    assert json.loads(text)["parity"]["loss"]["largest_error"] is None
    assert json.loads(text)["cost"] is None
