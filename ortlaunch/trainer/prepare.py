"""The data and the model of a configuration, opened and built in the same way for a run, a check and an export."""

from __future__ import annotations

import traceback
from itertools import islice

import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.base.own_code import is_users
from ortlaunch.config.load import first_line
from ortlaunch.config.schema import Config
from ortlaunch.data.loader import Loader, build_loader
from ortlaunch.data.position import Position
from ortlaunch.metrics.flops import flops_per_sample
from ortlaunch.models.checks import check_model
from ortlaunch.models.registry import construct
from ortlaunch.models.strides import close_gaps
from ortlaunch.models.task import Batch, Task
from ortlaunch.trainer.memory_error import is_lack_of_memory
from ortlaunch.trainer.optimizers import freeze
from ortlaunch.trainer.ranges import out_of_range
from ortlaunch.trainer.seeds import seed_everything
from ortlaunch.trainer.workers import Workers

_NO_COLLECTIVE = "No backend type associated with device type cpu"
"""torch's error for a collective on the CPU where the workers have NCCL alone; models are there before wrapping."""


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

    Weights that ``optimizer.groups`` freezes need no gradient.

    Raises:
        RequestError: for an unknown model, target, import or parameter, or for groups that do not suit the model.
    """
    seed_everything(config.seed)
    model = construct(config.model)
    if config.optimizer.groups and isinstance(model, torch.nn.Module):
        freeze(model, config.optimizer)
    return model


def build_seeded(config: Config) -> torch.nn.Module:
    """The plain model on the CPU, with the weights that ``seed`` gives on every worker.

    Raises:
        RequestError: as `construct_seeded`, or for a model that cannot be trained.
    """
    model = construct_seeded(config)
    check_model(model)
    close_gaps(model)
    return model


def check_vocabulary(model: torch.nn.Module, vocab_size: int | None) -> None:
    """Refuses data with token ids for which the model has no embedding.

    Raises:
        RequestError: with both sizes.
    """
    known = _vocabulary(model)
    if vocab_size is not None and known is not None and vocab_size > known:
        raise RequestError(
            f"the data has {vocab_size} token ids and the model knows {known}: set model.params.vocab_size={vocab_size}"
        )


def check_ids(model: torch.nn.Module, batch: Batch) -> None:
    """Refuses a first batch with token ids for which the model has no embedding, of data whose vocabulary is unknown.

    Raises:
        RequestError: with the largest id and the model's size.
    """
    known, ids = _vocabulary(model), batch.get("input_ids")
    if known is not None and ids is not None and ids.numel() and (largest := int(ids.max())) >= known:
        raise RequestError(
            f"the data has the token id {largest} and the model knows {known} ids: set model.params.vocab_size to the "
            "size of the data's vocabulary, or check data.dtype and the tokenizer that made the data"
        )


def counted_flops(config: Config, model: torch.nn.Module, task: Task, batch: Batch) -> float | None:
    """The operations of a sample, by the model's first forward; None for a forward that needs collectives on a GPU.

    All workers call it: a forward with a collective waits for each of them.

    Args:
        config: the run's configuration.
        model: the plain model, on the CPU.
        task: how it is called.
        batch: the first batch.

    Raises:
        RequestError: a model that is not the user's own code cannot compute the batch.
    """
    try:
        return flops_per_sample(model, task, batch)
    except (RuntimeError, ValueError, IndexError) as error:
        if _NO_COLLECTIVE in str(error):
            return None
        if (said := out_of_range(error, config)) is not None:
            raise RequestError(said) from error
        # The user's own code has its traceback.
        is_own = any(is_users(frame.filename) for frame in traceback.extract_tb(error.__traceback__))
        if is_own or is_lack_of_memory(error):
            raise
        sizes = [f"{name} {'x'.join(map(str, one.shape[1:]))}" for name, one in batch.items() if one.ndim > 1]
        raise RequestError(
            f"model={config.model.name} cannot compute a sample of data={config.data.name} ({', '.join(sizes)}): "
            f"{first_line(error)}: let model.params suit the data"
        ) from error


def _vocabulary(model: torch.nn.Module) -> int | None:
    """The number of token ids that a model knows; None if it does not say so."""
    known = getattr(getattr(model, "config", None), "vocab_size", None)
    return known if isinstance(known, int) else None


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
        batches = list(islice(loader, count))
        for batch in batches:
            check_ids(model, batch)
        return [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]
