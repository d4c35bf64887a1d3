"""What a probe holds for exchanges that go nowhere, in this process's own memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ortlaunch.estimate import exchange
from ortlaunch.estimate.probe import ProcessMeter

MIB = 2**20
QUARTER = MIB // 4
"""Numbers of fp32 in a MiB."""


@pytest.fixture(autouse=True)
def two_workers() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def peak_over_end(context: contextlib.AbstractContextManager[None], operation: str) -> float:
    """MiB by which the peak is above what is there after an exchange of 64 MiB, which are too many for the heap."""
    whole, part = torch.zeros(64 * QUARTER), torch.zeros(32 * QUARTER)
    meter = ProcessMeter()
    with context:
        meter.take_peak()
        if operation == "gather":
            dist.all_gather_into_tensor(whole, part)
        else:
            dist.reduce_scatter_tensor(part, whole)
        return (meter.take_peak().most - meter.now.most) / MIB


@pytest.mark.parametrize("operation", ["gather", "scatter"])
def test_an_exchange_holds_a_copy_of_the_whole(operation: str) -> None:
    assert peak_over_end(exchange.held(), operation) > 60
    # Afterwards the group is as before.
    assert peak_over_end(contextlib.nullcontext(), operation) < 4


def test_what_was_gathered_with_stays_in_both_threads() -> None:
    freed = torch.zeros(24 * QUARTER)
    # The threshold rises to 24 MiB, so that smaller blocks are kept.
    del freed
    whole, part = torch.zeros(16 * QUARTER), torch.zeros(8 * QUARTER)
    meter = ProcessMeter()
    with exchange.held():
        before = meter.now.most
        for _ in range(8):
            dist.all_gather_into_tensor(whole, part)
        kept = (meter.now.most - before) / MIB
    assert kept > 20  # Of 16 MiB in each.
