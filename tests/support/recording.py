"""What a worker of a pool was given to train on: the weights it began with, and each micro-batch that it took."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ortlaunch.models.task import Batch
from ortlaunch.trainer import build
from ortlaunch.trainer.feed import Feed
from ortlaunch.trainer.workers import Workers


@contextmanager
def recorded(folder: Path | None, workers: Workers) -> Iterator[None]:
    """Writes ``state-RANK.pt`` (weights and buffers by name) and ``batches-RANK.pt`` to `folder`; None writes nothing.

    The weights are those of the plain model before the backend and the trainer get it.
    """
    if folder is None:
        yield
        return
    wrap, take = build.wrap, Feed.take
    batches: list[Batch | None] = []

    def wrap_and_keep(model: torch.nn.Module, *others: Any) -> Any:
        # One copy of both, so that tensors which share memory still do.
        state = copy.deepcopy([_plain(model.named_parameters()), _plain(model.named_buffers())])
        torch.save(state, folder / f"state-{workers.rank}.pt")
        return wrap(model, *others)

    def take_and_keep(feed: Feed) -> Batch:
        batch = take(feed)
        # What a worker repeats so that it keeps up counts nowhere.
        batches.append(tree_map(torch.clone, batch) if feed.samples else None)
        return batch

    build.wrap, Feed.take = wrap_and_keep, take_and_keep  # type: ignore[method-assign]
    try:
        yield
    finally:
        build.wrap, Feed.take = wrap, take  # type: ignore[method-assign]
        torch.save(batches, folder / f"batches-{workers.rank}.pt")


def _plain(tensors: Iterator[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in tensors}
