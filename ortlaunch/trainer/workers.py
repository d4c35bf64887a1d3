"""A worker's place among all workers, and their collectives."""

from __future__ import annotations

import importlib.metadata
import os
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

import ortlaunch
from ortlaunch.base.errors import RequestError, TrainingError
from ortlaunch.config.schema import Config, Device

T = TypeVar("T")
_NO_LIMIT = timedelta(days=365)
_KEPT: list[dist.ProcessGroup] = []
# torch 2.13 has given this collective another name, and warns of the old one in the log of every run.
_gather_in_one = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass(frozen=True)
class Workers:
    """One worker's place among all workers of a run."""

    rank: int
    world_size: int
    device: torch.device
    threads: int
    """This worker's share of its machine's cores."""

    @property
    def is_first(self) -> bool:
        """Whether this is the worker that writes the journal."""
        return self.rank == 0

    def gather(self, values: list[float]) -> torch.Tensor:
        """Every worker's `values` as a (workers, len(values)) float64 tensor on the CPU, in one collective."""
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.world_size == 1:
            return mine.unsqueeze(0).cpu()
        everyone = torch.empty(self.world_size * mine.numel(), dtype=mine.dtype, device=self.device)
        _gather_in_one(everyone, mine)
        return everyone.view(self.world_size, -1).cpu()


def join(config: Config, device: Device) -> Workers:
    """Joins the process group that torchrun's environment describes: NCCL on CUDA, gloo on the CPU.

    Args:
        config: the run's configuration.
        device: `cuda` or `cpu`.

    Raises:
        RequestError: CUDA is asked for and this torch has none.
        TrainingError: the machines do not run the same software.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    threads = _threads()
    here = _take_device(device, int(os.environ.get("LOCAL_RANK", "0")), threads)
    timeout = timedelta(seconds=config.trainer.timeout_seconds)
    dist.init_process_group(
        "nccl" if device is Device.cuda else "gloo",
        store=_store_of_attempt(timeout.total_seconds()),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=here if device is Device.cuda else None,
    )
    if os.environ.get("LOCAL_WORLD_SIZE") != str(world_size):
        check_software()
    return Workers(rank, world_size, here, threads)


def join_or_alone(config: Config, device: Device) -> Workers:
    """Joins as `join` does; a script may have joined already, or be its only worker.

    Raises:
        RequestError: CUDA is asked for and this torch has none.
    """
    if not dist.is_initialized():
        if "RANK" in os.environ:
            return join(config, device)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("nccl" if device is Device.cuda else "gloo", store=store, rank=0, world_size=1)
    threads = _threads()
    here = _take_device(device, int(os.environ.get("LOCAL_RANK", "0")), threads)
    return Workers(dist.get_rank(), dist.get_world_size(), here, threads)


def kept_store() -> Any:
    """torchrun's store, which outlives the workers that it starts again; None for workers that it has not started."""
    from torch.distributed.distributed_c10d import _get_default_store

    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    store = _get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _threads() -> int:
    """This worker's share of the cores, as its launcher has set it."""
    return int(os.environ.get("OMP_NUM_THREADS") or torch.get_num_threads())


def _store_of_attempt(seconds: float) -> PrefixStore:
    """torchrun's store, in which workers find each other.

    Args:
        seconds: the longest wait for a value.
    """
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=seconds)))
    # torchrun keeps its store when it restarts workers, with the addresses of those that died still in it.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"ortlaunch/{attempt}", store)


def single_worker(device: Device, threads: int) -> Workers:
    """The only worker of its process, without a process group, on the device that a run's first worker would have.

    Args:
        device: `cuda` or `cpu`.
        threads: its share of the cores.

    Raises:
        RequestError: CUDA is asked for and this torch has none.
    """
    return Workers(0, 1, _take_device(device, 0, threads), threads)


def _take_device(device: Device, local_rank: int, threads: int) -> torch.device:
    """Makes a worker's device the default one of its process, and limits torch's threads on the CPU."""
    if device is not Device.cuda:
        torch.set_num_threads(threads)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RequestError(
            f"device=cuda, but torch {torch.__version__} sees no GPU: install a CUDA build of torch, or device=cpu"
        )
    here = torch.device("cuda", local_rank)
    torch.cuda.set_device(here)
    return here


def separate_group(config: Config) -> dist.ProcessGroup:
    """A group of all workers on the CPU, for collectives beside those of the training; all workers call it."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.trainer.timeout_seconds))
    assert isinstance(group, dist.ProcessGroup)
    # Never destroyed: see `leave_group`.
    _KEPT.append(group)
    leave_limits_to_watch()
    return group


def leave_group(workers: Workers) -> None:
    """Destroys NCCL's group; groups on the CPU are left as they are, and the process must end by ``os._exit``.

    Gloo's destructor waits for its threads while it holds Python's lock, and one of them may wait for that lock to
    release the last tensor of a collective: on torch 2.6.0 one of 35 short runs deadlocked there after its last step.
    """
    if workers.device.type == "cuda":
        dist.destroy_process_group(dist.group.WORLD)


def values_of_all(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every worker's value, which pickle must take, in the order of their ranks.

    Args:
        value: this worker's.
        group: the workers; None for all of the run.
    """
    everyone = [value] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def check_software() -> None:
    """Compares the versions of all workers, by one collective.

    Raises:
        TrainingError: the machines do not run the same software.
    """
    host = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    everyone = values_of_all((host, _versions()))
    others = sorted({f"{host}: {versions}" for host, versions in everyone if versions != everyone[0][1]})
    if others:
        first = ": ".join(everyone[0])
        raise TrainingError("the nodes do not run the same software:\n" + "\n".join([first, *others[:16]]))


def _versions() -> str:
    found = "none"
    for name in ("onnxruntime-training", "onnxruntime-training-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found = importlib.metadata.version(name)
    return f"ortlaunch {ortlaunch.__version__}, torch {torch.__version__}, onnxruntime {found}"


def leave_limits_to_watch() -> None:
    """Takes the time limit from the collectives of all gloo groups that exist. The watch must have been started.

    Gloo measures by a clock that goes on while the process does not run. If all workers of a job are suspended for
    longer than the limit, those that wait in a collective would fail when they go on.
    """
    from torch.distributed.distributed_c10d import ProcessGroupGloo, _world

    for group in list(_world.pg_map):
        with suppress(RuntimeError):  # The group has no backend for the CPU.
            backend = group._get_backend(torch.device("cpu"))
            if isinstance(backend, ProcessGroupGloo):
                backend._set_default_timeout(_NO_LIMIT)


def set_time_limits(config: Config, workers: Workers) -> None:
    """Sets the limits of collectives after the first step, which includes export and compilation.

    NCCL's collectives get the time that a step may take, and one that takes longer writes NCCL's flight recorder. On
    the CPU only the watch ends a worker that hangs.
    """
    leave_limits_to_watch()
    if workers.device.type == "cuda":
        from torch.distributed.distributed_c10d import _set_pg_timeout

        torch.cuda.synchronize()
        _set_pg_timeout(timedelta(seconds=config.launcher.timeout_seconds + 60), dist.group.WORLD)
