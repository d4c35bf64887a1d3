"""Batches of any form: walked, cut, joined and made of samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import default_collate

from ortlaunch.data.batch import (
    UnlikeError,
    cloned,
    collate,
    count,
    digest,
    joined,
    labels,
    mapped,
    named,
    part,
    tokens,
)
from tests.data.own_data import Pair, Sample

_TYPES = st.sampled_from([torch.float32, torch.int64, torch.bool])
LEAVES = st.builds(lambda shape, dtype: ("tensor", shape, dtype), st.lists(st.integers(1, 3), max_size=2), _TYPES)
FORMS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=6,
)


def made(form: Any, value: int) -> Any:
    """A sample of a form."""
    if isinstance(form, dict):
        return {name: made(one, value) for name, one in form.items()}
    if form[0] == "tensor":
        return torch.full(form[1], value).to(form[2])
    return (
        Pair(*(made(one, value) for one in form)) if isinstance(form, Pair) else tuple(made(one, value) for one in form)
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(form=FORMS, number=st.integers(1, 4), cut=st.integers(0, 4))
def test_batches_of_any_form(form: Any, number: int, cut: int) -> None:
    samples = [made(form, value) for value in range(number)]
    batch = collate(samples)
    expected = default_collate(samples)
    assert all(map(torch.equal, tree_leaves(batch), tree_leaves(expected)))
    assert list(map(id, named(batch).values())) == list(map(id, tree_leaves(batch)))
    assert count(batch) == number
    first, rest = part(batch, 0, cut), part(batch, cut, number)
    again = joined(first, rest)
    assert all(map(torch.equal, tree_leaves(again), tree_leaves(batch)))
    assert digest(again) == digest(batch)
    copied = cloned(batch)
    assert torch.utils._pytree.tree_structure(copied) == torch.utils._pytree.tree_structure(batch)
    assert not {one.data_ptr() for one in tree_leaves(copied)} & {one.data_ptr() for one in tree_leaves(batch)}
    changed = mapped(batch, lambda one: one.float() + 1)
    assert all(map(torch.equal, tree_leaves(changed), tree_leaves(tree_map(lambda one: one.float() + 1, batch))))
    assert (digest(changed) == digest(batch)) is False


def test_texts_go_along_and_lists_of_numbers_are_rows() -> None:
    batch = collate([Sample(number, {"text": str(number), "ids": [number, 1]}) for number in range(3)])
    assert batch.parts["text"] == ["0", "1", "2"] and batch.parts["ids"].tolist() == [[0, 1], [1, 1], [2, 1]]
    second = part(batch, 1, 2)
    assert second.number.tolist() == [1] and second.parts["text"] == ["1"]
    assert joined(second, batch).parts["text"] == ["1", "0", "1", "2"]


def test_what_a_batch_counts_and_is_compared_with() -> None:
    ids = torch.ones(2, 3, dtype=torch.int64)
    assert tokens({"left": {"input_ids": ids}, "right": ({"input_ids": ids},), "labels": ids}) == 12
    assert labels({"labels": ids}) is ids and labels((ids, ids[0])) is not None
    assert labels((ids,)) is None and labels(ids) is None and labels({"x": ids}) is None
    assert part({"x": ids, "all": torch.ones(5)}, 0, 1) is None and joined(ids, ids[:, :2]) is None


@pytest.mark.parametrize(
    ("samples", "place", "text"),
    [
        ([{"a": 1}, {"a": 1}, {"b": 1}], 2, "the sample is a dict of b, and that of the first a dict of a"),
        ([{"a": (1, torch.ones(2))}, {"a": (1, torch.ones(3))}], 1, "a.1 is a Tensor of shape (3,), and"),
        ([(1, 2), (1,)], 1, "a tuple of 1"),
        ([{"a": object()}] * 2, 0, "a is a object, which makes no batch"),
        ([{"a": [1]}, {"a": [1, 2]}], 1, "a is a Tensor of shape (2,)"),
    ],
)
def test_samples_that_differ_are_named(samples: list[Any], place: int, text: str) -> None:
    with pytest.raises(UnlikeError) as unlike:
        collate(samples)
    assert unlike.value.place == place and text in str(unlike.value)
