"""Batches on their way to the device."""

from __future__ import annotations

from itertools import islice

import torch

from ortlaunch.config.schema import SyntheticConfig
from ortlaunch.data.loader import build_loader
from ortlaunch.trainer.feed import Feed, Lookahead


def test_batches_come_in_order_and_the_position_is_that_of_what_was_given_out() -> None:
    cfg = SyntheticConfig(seq_len=4, samples=20)
    options = {"batch_size": 2, "rank": 0, "world_size": 1, "seed": 0}
    expected = [batch["input_ids"].tolist() for batch in islice(build_loader(cfg, **options), 6)]
    loader = build_loader(cfg, **options)
    batches = Lookahead(loader)
    # Read before training takes them, as the check at the start of a run does.
    for count in (1, 2, 1):
        assert [batch["input_ids"].tolist() for batch in batches.peek(count)] == expected[:count]
    feed = Feed(batches, torch.device("cpu"))
    given = []
    for count in range(1, 4):
        given.append(feed.take()["input_ids"].tolist())
        feed.prefetch()
        # Going on from the position gives what would have come.
        rest = build_loader(cfg, **options, start=feed.position)
        assert given + [batch["input_ids"].tolist() for batch in islice(rest, 6 - count)] == expected
    assert feed.waited > 0
