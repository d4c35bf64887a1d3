"""The data and the model of a configuration, opened and built in the same way for a run, a check and an export."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

from ortlaunch.base.errors import RequestError
from ortlaunch.base.own_code import place_of
from ortlaunch.config.load import first_line
from ortlaunch.config.schema import Config, LoraConfig
from ortlaunch.data.batch import described, ids, moved
from ortlaunch.data.loader import Loader, build_loader
from ortlaunch.data.position import Position
from ortlaunch.data.sources.factory import FactoryConfig
from ortlaunch.metrics.flops import flops_per_sample
from ortlaunch.models.checks import check_model
from ortlaunch.models.lora import add_lora
from ortlaunch.models.own_step import make_step
from ortlaunch.models.registry import construct
from ortlaunch.models.strides import close_gaps
from ortlaunch.models.task import Batch, Task
from ortlaunch.trainer.memory_error import is_lack_of_memory
from ortlaunch.trainer.optimizers import freeze
from ortlaunch.trainer.ranges import out_of_range
from ortlaunch.trainer.seeds import seed_everything
from ortlaunch.trainer.weights import load_weights
from ortlaunch.trainer.workers import Workers, values_of_all

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

    Weights that ``optimizer.groups`` freezes need no gradient, and none but an adapter's where there is one.

    Raises:
        RequestError: for an unknown model, target, import or parameter, or for groups that do not suit the model.
    """
    seed_everything(config.seed)
    model = construct(config.model)
    if isinstance(config.adapter, LoraConfig) and isinstance(model, torch.nn.Module):
        # An adapter hides the names of the weights that it is beside.
        if config.model.weights is not None:
            load_weights(model, Path(config.model.weights))
        add_lora(model, config.adapter)
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
    known = _vocabulary(model)
    largest = max((int(one.max()) for one in ids(batch) if one.numel()), default=-1)
    if known is not None and largest >= known:
        raise RequestError(
            f"the data has the token id {largest} and the model knows {known} ids: set model.params.vocab_size to the "
            "size of the data's vocabulary, or check data.dtype and the tokenizer that made the data"
        )


def check_shares(loader: Loader, group: dist.ProcessGroup) -> None:
    """Refuses a stream that all workers, or all loader processes of a worker, read alike. All workers call it.

    Raises:
        RequestError: with what to write.
    """
    everyone = values_of_all(loader.first_digests(), group)
    of_processes = any(len(one) > 1 and len(set(one)) == 1 for one in everyone)
    if of_processes or (len(everyone) > 1 and everyone[0] and all(one == everyone[0] for one in everyone)):
        who = "all loader processes of a worker" if of_processes else "all workers"
        raise RequestError(
            f"{loader.origin}: {who} read the same samples first, so each sample would be trained on several times: "
            "let __iter__ take a part by torch.distributed.get_rank() and torch.utils.data.get_worker_info(), or have "
            "the samples shared out by data.shard=true"
        )


def task_of(config: Config, model: torch.nn.Module, batch: Batch) -> Task:
    """How a run calls its model: as its steps do, or with the batch.

    Raises:
        RequestError: a step cannot be imported, or the model does not take the batch.
    """
    return make_step(model, batch, config.train.step, config.eval.step)


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
        place = place_of(error)
        # The user's own code has its traceback, but for the shapes of own data.
        if (place and not isinstance(config.data, FactoryConfig)) or is_lack_of_memory(error):
            raise
        at = f" ({place})" if place else ""
        raise RequestError(
            f"model={config.model.target or config.model.name} cannot compute a sample of data={config.data.name} "
            f"({described(batch)}): {first_line(error)}{at}: let the model suit the data"
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
        return [moved(batch, device) for batch in batches]
