"""The model, the data and the way to call them that a run of the configuration would have, for one worker alone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from ortlaunch.config.devices import resolve_device
from ortlaunch.config.schema import Config, Device
from ortlaunch.data.loader import build_loader
from ortlaunch.models.registry import construct
from ortlaunch.models.task import Batch
from ortlaunch.trainer.run import check_vocabulary
from ortlaunch.trainer.seeds import seed_everything
from ortlaunch.trainer.workers import Workers


@dataclass(frozen=True)
class Place:
    """Where the check computes."""

    device: torch.device
    threads: int

    @property
    def worker(self) -> Workers:
        """The only worker of a run, with no process group."""
        return Workers(0, 1, self.device, self.threads)


def place(config: Config, threads: int) -> Place:
    """The device of a run's first worker, and its share of the cores."""
    torch.set_num_threads(threads)
    if resolve_device(config.device) is Device.cuda:
        torch.cuda.set_device(0)
        return Place(torch.device("cuda", 0), threads)
    return Place(torch.device("cpu"), threads)


def first_batches(
    config: Config, batch_size: int, count: int, model: torch.nn.Module, device: torch.device
) -> list[Batch]:
    """The first batches of the run's data, on the device.

    Raises:
        RequestError: there is no such data, or `model` does not know its token ids.
    """
    with build_loader(config.data, batch_size=batch_size, rank=0, world_size=1, seed=config.seed) as loader:
        check_vocabulary(model, loader.vocab_size)
        return [{name: tensor.to(device) for name, tensor in batch.items()} for batch in islice(loader, count)]


def built(config: Config) -> Any:
    """What the model's builder returns, with the weights that a run would start from."""
    seed_everything(config.seed)
    return construct(config.model)
