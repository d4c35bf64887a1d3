"""What a snapshot shares with the training state, and what it copies."""

from __future__ import annotations

import torch

from ortlaunch.trainer.checkpoint.host import to_host


def test_a_copy_shares_nothing() -> None:
    weight = torch.ones(4)
    copied = to_host({"weight": weight})
    weight.zero_()
    assert copied["weight"].tolist() == [1.0] * 4


def test_a_state_that_does_not_change_any_more_is_not_copied() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    shared = to_host({"weight": weight, "tied": weight}, shared=True)
    assert shared["weight"].data_ptr() == weight.data_ptr()
    assert shared["tied"] is shared["weight"]
    assert not shared["weight"].requires_grad


def test_a_view_is_copied_without_the_rest_of_its_storage() -> None:
    """Else a file would hold the whole buffer for each tensor that is a part of it."""
    buffer = torch.arange(10.0)
    found = to_host([buffer[2:5], buffer.view(2, 5).T], shared=True)
    assert [one.untyped_storage().nbytes() for one in found] == [12, 40]
    assert found[0].tolist() == [2.0, 3.0, 4.0]
    assert found[1].is_contiguous()
