"""What a snapshot shares with the training state, and what it copies."""

from __future__ import annotations

import weakref

import torch

from ortlaunch.trainer.checkpoint.host import HostMemory, to_host


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


def test_a_snapshot_is_copied_into_the_memory_of_the_one_before() -> None:
    memory = HostMemory()
    weight, moment = torch.arange(6.0).view(2, 3).T, torch.ones(3, 2)
    places = []
    for _ in range(3):
        weight += 1
        moment *= 2
        with memory.copying(keep=True):
            copied = to_host({"weight": weight, "tied": weight, "moment": moment}, memory=memory)
        assert copied["tied"] is copied["weight"]
        assert copied["weight"].is_contiguous()
        assert torch.equal(copied["weight"], weight)
        assert torch.equal(copied["moment"], moment)
        places.append({copied["weight"].data_ptr(), copied["moment"].data_ptr()})
    assert len(places[0]) == 2
    assert places[0] == places[1] == places[2]


def test_a_state_of_another_structure_gets_new_memory_and_lets_the_rest_go() -> None:
    memory = HostMemory()
    with memory.copying(keep=True):
        before = to_host([torch.ones(3), torch.ones(5)], memory=memory)
    same, gone = (weakref.ref(one) for one in before)
    del before
    assert gone() is not None
    state = [torch.zeros(3), torch.zeros(3), torch.zeros(5, dtype=torch.int64)]
    with memory.copying(keep=True):
        after = to_host(state, memory=memory)
    assert after[0] is same()
    assert gone() is None
    assert all(map(torch.equal, after, state))
    assert len({one.data_ptr() for one in after}) == 3


def test_memory_that_is_not_kept_lives_as_long_as_the_copy() -> None:
    memory = HostMemory()
    with memory.copying(keep=True):
        place = to_host(torch.ones(3), memory=memory).data_ptr()
    with memory.copying(keep=False):
        copied = to_host(torch.ones(3), memory=memory)
    assert copied.data_ptr() == place
    gone = weakref.ref(copied)
    del copied
    assert gone() is None


def test_without_a_copy_the_memory_of_the_one_before_is_let_go() -> None:
    """The last checkpoint and one at a stop are written from where the state is."""
    memory, weight = HostMemory(), torch.ones(3)
    with memory.copying(keep=True):
        gone = weakref.ref(to_host(weight, memory=memory))
    assert gone() is not None
    with memory.copying(keep=False):
        assert to_host(weight, shared=True, memory=memory).data_ptr() == weight.data_ptr()
    assert gone() is None
