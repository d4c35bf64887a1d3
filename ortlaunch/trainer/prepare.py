"""The data and the model of a configuration, opened and built in the same way for a run, a check and an export."""

from __future__ import annotations

from itertools import islice

import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import Config
from ortlaunch.data.loader import Loader, build_loader
from ortlaunch.data.position import Position
from ortlaunch.models.checks import check_model
from ortlaunch.models.registry import construct
from ortlaunch.models.task import Batch
from ortlaunch.trainer.seeds import seed_everything
from ortlaunch.trainer.workers import Workers


def open_loader(
    config: Config, workers: Workers, *, batch_size: int | None = None, start: Position | None = None
) -> Loader:
    """Opens this worker's share of the run's data.

    Args:
        config: the run's configuration.
        workers: this worker's place.
        batch_size: samples per batch; None for ``train.batch_size``.
        start: where the data continues; None for its beginning.

    Raises:
        RequestError: the data cannot be opened, or has less than one batch for each worker.
    """
    return build_loader(
        config.data,
        batch_size=config.train.batch_size if batch_size is None else batch_size,
        rank=workers.rank,
        world_size=workers.world_size,
        seed=config.seed,
        pin_memory=workers.device.type == "cuda",
        start=start,
    )


def construct_seeded(config: Config) -> torch.nn.Module:
    """What the model's builder returns, not yet checked, with the weights that ``seed`` gives on every worker.

    It is in training mode, but for those of its modules that are kept in evaluation mode.

    Raises:
        RequestError: for an unknown model, target, import or parameter.
    """
    seed_everything(config.seed)
    model = construct(config.model)
    # A library may load a model in evaluation mode as a whole, as transformers' `from_pretrained` does.
    if isinstance(model, torch.nn.Module) and not model.training:
        model.train()
    return model


def build_seeded(config: Config) -> torch.nn.Module:
    """The plain model on the CPU, with the weights that ``seed`` gives on every worker.

    Raises:
        RequestError: for an unknown model, target, import or parameter, or for a model that cannot be trained.
    """
    model = construct_seeded(config)
    check_model(model)
    return model


def check_vocabulary(model: torch.nn.Module, vocab_size: int | None) -> None:
    """Refuses data with token ids for which the model has no embedding.

    Raises:
        RequestError: with both sizes.
    """
    known = getattr(getattr(model, "config", None), "vocab_size", None)
    if vocab_size is not None and isinstance(known, int) and vocab_size > known:
        raise RequestError(
            f"the data has {vocab_size} token ids and the model knows {known}: set model.params.vocab_size={vocab_size}"
        )


def first_batches(
    config: Config, batch_size: int, count: int, model: torch.nn.Module, device: torch.device
) -> list[Batch]:
    """The first batches that a single worker of the run would read, on the device.

    Raises:
        RequestError: the data cannot be opened, or `model` has no embedding for its token ids.
    """
    worker = Workers(0, 1, device, torch.get_num_threads())
    with open_loader(config, worker, batch_size=batch_size) as loader:
        check_vocabulary(model, loader.vocab_size)
        return [{name: tensor.to(device) for name, tensor in batch.items()} for batch in islice(loader, count)]
