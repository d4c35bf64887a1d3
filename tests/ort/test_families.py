"""Each family trains under ORT as it trains eager, on real data; ``tests/ort/families.md`` shows what was measured."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from ortlaunch.models.checks import check_model
from tests.ort.families import BY_NAME, FAMILIES
from tests.ort.families_table import TABLE, TESTED, read
from tests.ort.parity import PARTS, STEPS, TOLERANCE, Parity, compared, measure, train

CASES = [
    pytest.param(
        family.name,
        part,
        id=f"{family.name}-{part}",
        # Strict: a defect that is mended has to leave the list.
        marks=[pytest.mark.xfail(reason=family.defects[part], strict=True)] if part in family.defects else [],
    )
    for family in FAMILIES
    for part in PARTS
]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The fastest for models this small, and deaf to what else runs on the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def measured(name: str) -> Parity:
    return measure(BY_NAME[name], Path("unused"))


@pytest.mark.parametrize("name", BY_NAME)
def test_onnx_runtime_computes_it_from_the_first_step_to_the_last(name: str) -> None:
    result = measured(name)
    assert not result.failure
    assert result.exported


@pytest.mark.parametrize(("name", "part"), CASES)
def test_a_family_trains_as_eager_does(name: str, part: str) -> None:
    """Loss of each step, first outputs and gradients, and after three steps every parameter and buffer."""
    result = measured(name)
    wrong = {tensor: error for tensor, error in result.errors[part].items() if not error <= TOLERANCE[part]}
    assert not wrong


@pytest.mark.parametrize("name", BY_NAME)
def test_nothing_was_left_out_of_the_comparison(name: str) -> None:
    model, errors = BY_NAME[name].build(), measured(name).errors
    check_model(model)
    parameters = dict(model.named_parameters())
    assert set(errors["parameters"]) == set(parameters)
    assert set(errors["buffers"]) == {key for key, _ in model.named_buffers()}
    assert set(errors["gradients"]) == set(parameters)
    assert len(errors["loss"]) == STEPS
    assert errors["outputs"]


@pytest.mark.parametrize("name", BY_NAME)
def test_every_step_has_another_shape_and_moves_the_weights(name: str) -> None:
    """Else equal parameters after three steps would mean little."""
    family = BY_NAME[name]
    batches = [family.batch(step) for step in range(STEPS)]
    assert len({next(iter(batch.values())).shape for batch in batches}) == STEPS
    model = family.build()
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    train(copy.deepcopy(model), model, family)
    moved = compared(before, dict(model.named_parameters()))
    # Softmax does not see what a key's bias adds to all scores alike: its gradient is nothing but rounding.
    still = [key for key, share in moved.items() if share < 10 * TOLERANCE["parameters"]]
    assert not [key for key in still if not key.endswith((".key.bias", ".k_proj.bias", ".k_lin.bias"))]


@pytest.mark.parametrize(
    "other",
    [
        {"w": torch.tensor([1.0, 2.001])},
        {"w": torch.tensor([1.0, 2.0]).double()},
        {"w": torch.tensor([1.0, float("nan")])},
        {"w": torch.tensor([[1.0, 2.0]])},
        {},
        {"w": torch.tensor([1.0, 2.0]), "v": torch.tensor(1.0)},
    ],
    ids=["value", "dtype", "nan", "shape", "missing", "more"],
)
def test_the_comparison_sees_a_difference(other: dict[str, torch.Tensor]) -> None:
    expected = {"w": torch.tensor([1.0, 2.0])}
    assert max(compared(expected, expected).values()) == 0.0
    assert max(compared(expected, other).values()) > max(TOLERANCE.values())


def test_the_table_in_the_docs_tells_of_every_family_and_torch() -> None:
    rows = {(row.family, row.torch): row for row in read(TABLE)}
    assert set(rows) == {(family.name, version) for family in FAMILIES for version in TESTED}
    for (name, _), row in rows.items():
        assert row.exported == "yes"
        assert row.parity.startswith("no" if BY_NAME[name].defects else "yes")
