"""Whether the least that training holds fits into the memory that is there: weights, gradients and optimizer state.

The sum has no activations and no buffers of the trainer, so that a run which does not fit by it does not fit.
`ortlaunch estimate` traces the rest.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.base.free_memory import available
from ortlaunch.base.text import size
from ortlaunch.config.neighbours import further_changes, in_words, none_is_enough
from ortlaunch.config.schema import Config, Device, MemoryCheck, OptimizerConfig, Precision
from ortlaunch.config.trainers import trainer_of
from ortlaunch.config.trainers.base import Weights
from ortlaunch.trainer.optimizers import known_state
from ortlaunch.trainer.precision import DTYPES
from ortlaunch.trainer.session import Session
from ortlaunch.trainer.workers import Workers, values_of_all


@dataclass(frozen=True)
class Room:
    """The memory that a run's workers can take."""

    total: int
    """Bytes of this machine, or of this worker's GPU."""
    workers: int
    """Workers on each machine."""
    nodes: int
    on_gpu: bool

    def share(self, workers: int) -> int:
        """Bytes for each of so many workers on the machine."""
        return self.total if self.on_gpu else self.total // workers


def check_state(session: Session, model: torch.nn.Module) -> None:
    """Warns of a run whose state does not fit, or refuses it; all workers call it with the plain model that they built.

    Raises:
        RequestError: with ``train.memory_check=error``, the state does not fit.
    """
    config, check = session.config, session.config.train.memory_check
    if check is MemoryCheck.off:
        return
    has_average = config.train.ema is not None
    weights = weights_of(model, config.optimizer, config.train.precision, has_average=has_average)
    room = _room(session.workers, weights)
    # Whoever comes last has seen the machine with the models of all its workers.
    _, line = max(values_of_all(judged(config, weights, room), session.control))
    if line and check is MemoryCheck.error:
        raise RequestError(line)
    if line and session.workers.is_first:
        print(f"warning: {line}", flush=True)


def weights_of(
    model: torch.nn.Module, optimizer: OptimizerConfig, precision: Precision, *, has_average: bool = False
) -> Weights:
    """What a plain model holds, and what the optimizer will hold for it, with the average of the weights."""
    trained = [one for one in model.parameters() if one.requires_grad]
    return Weights(
        buffers=sum(one.nbytes for one in model.buffers()),
        parameters=sum(one.nbytes for one in model.parameters()),
        trained=sum(one.nbytes for one in trained),
        optimizer=known_state(model, optimizer) + (sum(one.nbytes for one in trained) if has_average else 0),
        low_share=DTYPES[precision].itemsize / torch.float32.itemsize,
    )


def judged(config: Config, weights: Weights, room: Room) -> tuple[int, str]:
    """By how many bytes the state of a worker exceeds its share, and this in words; 0 and no words if it fits."""
    there, needed = room.share(room.workers), _needed(config, weights, room.workers * room.nodes)
    if needed <= there:
        return 0, ""
    where = "its GPU" if room.on_gpu else f"its share of {socket.gethostname()}"
    return needed - there, (
        f"the run does not fit into memory: a worker holds {size(needed)} of weights, gradients and optimizer state, "
        f"and {size(there)} are free ({where}). By this sum {_change(config, weights, room)}; ortlaunch estimate with "
        "the same keys knows the activations too. train.memory_check=off does not check"
    )


def _change(config: Config, weights: Weights, room: Room) -> str:
    """The nearest change that fits by the sum, in words."""
    kinds = further_changes(config, room.workers, on_gpu=room.on_gpu)
    for changed in (one for kind in kinds.values() for one in kind):
        workers = changed.launcher.workers_per_node or room.workers
        fits = _needed(changed, weights, workers * room.nodes) <= room.share(workers)
        if fits and _is_allowed(changed, on_gpu=room.on_gpu):
            return f"{in_words(changed, config)} fits"
    return none_is_enough(kinds)


def _needed(config: Config, weights: Weights, workers: int) -> int:
    return trainer_of(config.trainer).state_bytes(config.trainer, weights, workers)


def _is_allowed(config: Config, *, on_gpu: bool) -> bool:
    """Whether the trainer takes a changed configuration."""
    trainer = trainer_of(config.trainer)
    try:
        trainer.check(config, Device.cuda if on_gpu else Device.cpu)
    except RequestError:
        return False
    return trainer.refusal(config.backend.name, config.train.precision, trainer.variant(config.trainer)) is None


def _room(workers: Workers, weights: Weights) -> Room:
    """What is free here, and what the models take that this machine's workers have built."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    on_gpu = workers.device.type == "cuda"
    # A model is built in the host's memory, also for a GPU.
    free = torch.cuda.mem_get_info(workers.device)[0] if on_gpu else available() + here * weights.built
    return Room(free, here, workers.world_size // here, on_gpu)
