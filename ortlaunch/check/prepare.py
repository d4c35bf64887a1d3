"""Builds the model and loads the data of a run's configuration, for a single worker."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch

from ortlaunch.config.devices import resolve_device
from ortlaunch.config.schema import Config, Device
from ortlaunch.data import build_loader
from ortlaunch.models.registry import construct
from ortlaunch.models.task import Batch
from ortlaunch.trainer.run import check_vocabulary
from ortlaunch.trainer.seeds import seed_everything
from ortlaunch.trainer.workers import Workers


def only_worker(config: Config, threads: int) -> Workers:
    """Returns the only worker of a run, with the device of its first worker and without a process group.

    Args:
        config: the configuration of the run.
        threads: the worker's share of the machine's cores, which torch is set to.
    """
    torch.set_num_threads(threads)
    if resolve_device(config.device) is Device.cuda:
        torch.cuda.set_device(0)
        return Workers(0, 1, torch.device("cuda", 0), threads)
    return Workers(0, 1, torch.device("cpu"), threads)


def first_batches(
    config: Config, batch_size: int, count: int, model: torch.nn.Module, device: torch.device
) -> list[Batch]:
    """Returns the first batches of the run's data, on the device.

    Raises:
        RequestError: the data cannot be loaded, or `model` does not know its token ids.
    """
    with build_loader(config.data, batch_size=batch_size, rank=0, world_size=1, seed=config.seed) as loader:
        check_vocabulary(model, loader.vocab_size)
        return [{name: tensor.to(device) for name, tensor in batch.items()} for batch in islice(loader, count)]


def built(config: Config) -> Any:
    """Returns the result of the model's builder, with the weights that a run would start from."""
    seed_everything(config.seed)
    return construct(config.model)
