"""Lets the run's own engines work on fake tensors, as one of several workers, in a process that is alone.

Each replacement stands for something that needs real numbers or other processes and takes no memory of its own: a value
that workers compare, the exchange itself, a tensor's address.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as distributed_c10d
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from ortlaunch.base.attributes import replaced
from ortlaunch.config.devices import usable_cores
from ortlaunch.config.schema import Config
from ortlaunch.launch.torchrun import threads_per_worker
from ortlaunch.trainer.engine import Engine
from ortlaunch.trainer.workers import Workers

_FEW = 256
"""So many numbers may keep their content."""
_SHAPES = "_propagate_tensor_meta_non_cached"
"""DTensor's method that finds the shapes of an operation's results."""
_WITH_RESULTS = (
    "broadcast_",
    "allreduce_",
    "allgather_",
    "_allgather_base_",
    "reduce_scatter_",
    "_reduce_scatter_base_",
)
_ALONE = ("reduce_", "gather_", "barrier", "alltoall_base_", "allreduce_coalesced_", "allgather_coalesced_")
_COALESCED = ("allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_")
"""Operations that exchange; the first ones return their results beside a handle."""


def join_nobody(world_size: int) -> Workers:
    """Makes this process the first of `world_size` workers; what it exchanges with the others goes nowhere."""
    _exchange_without_content()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    return Workers(0, world_size, torch.device("cpu"), torch.get_num_threads())


def threads_of(config: Config, workers: int) -> int:
    """The CPU threads of a worker in a run; a process that traces it has one.

    Args:
        config: the run's configuration.
        workers: workers on a machine.
    """
    cores = getattr(config.launcher, "cpus_per_node", None) or usable_cores()
    return threads_per_worker(config, workers, cores)


@functools.cache
def _exchange_without_content() -> torch.library.Library | None:
    """Lets exchanges take tensors without content on torch 2.6, as they do in newer versions: they end at once.

    Returns:
        What holds for as long as it is kept.
    """
    if importlib.util.find_spec("torch.distributed._meta_registrations") is not None:
        return None
    library = torch.library.Library("c10d", "IMPL")
    for name in _WITH_RESULTS:
        library.impl(name, lambda results, *_: (results, _complete()), "Meta")
    for name in _ALONE + _COALESCED:
        library.impl(name, lambda *_: _complete(), "Meta")
    return library


def _complete() -> Any:
    """The handle of an exchange that has ended."""
    done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    done.set_result([])
    return distributed_c10d._create_work_from_future(done).boxed()  # type: ignore[attr-defined]


@contextlib.contextmanager
def replacements(*, on_gpu: bool = False) -> Iterator[None]:
    """Within it, the engines can be built and used on fake tensors.

    Args:
        on_gpu: whether they do what they would on a GPU.
    """
    from ortlaunch.trainer.checkpoint import host, torch_state
    from ortlaunch.trainer.engines import fsdp_engine

    with contextlib.ExitStack() as stack:
        for place, name, value in (
            # DistributedDataParallel compares shapes with the other workers.
            (torch.nn.parallel.distributed, "_verify_param_shape_across_processes", _nothing),
            # Modules move to their device by swapping tensors, which weak references on them forbid.
            (torch.utils, "swap_tensors", _take_data),
            # The mesh of workers is a tensor of real numbers.
            (fsdp_engine, "init_device_mesh", _outside(init_device_mesh)),
            # To find an operation's sharding, DTensor runs it on fake tensors of the whole shape.
            (ShardingPropagator, _SHAPES, _outside(getattr(ShardingPropagator, _SHAPES))),
            # It draws again what is out of bounds, until its numbers say that nothing is.
            (torch.nn.init, "_no_grad_trunc_normal_", _drawn_once(torch.nn.init._no_grad_trunc_normal_)),
            # Fake tensors have no address.
            (host, "storage_key", _storage_key),
            (torch_state, "storage_key", _storage_key),
        ):
            stack.enter_context(replaced(place, name, value))
        if "deepspeed" in sys.modules:
            _replace_in_deepspeed(stack)
            if on_gpu:
                _as_deepspeed_on_gpu(stack)
        yield


@contextlib.contextmanager
def loaded_without_content(mode: FakeTensorMode, adopt: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Within it, a parameter with content becomes a fake one when a module gets it, and is counted.

    Weights that are read from files have content: transformers reads them in other threads, for which the mode does
    not hold, and safetensors makes them without an operation. A parameter with content cannot take the fake result of
    an operation as its data. What safetensors' ``load_file`` gives is a part of a mapped file, too.
    """
    import safetensors.torch

    usual = safetensors.torch.load_file

    def load_file(*arguments: Any, **named: Any) -> dict[str, torch.Tensor]:
        with _disable_current_modes():
            found = usual(*arguments, **named)
        fakes: dict[str, torch.Tensor] = {name: mode.from_tensor(tensor) for name, tensor in found.items()}
        for fake in fakes.values():
            adopt(fake)
        return fakes

    def taken(_module: torch.nn.Module, _name: str, parameter: torch.nn.Parameter | None) -> torch.Tensor | None:
        if type(parameter) is not torch.nn.Parameter or isinstance(parameter, FakeTensor):
            return None
        if parameter.device.type == "meta":
            return None
        fake = mode.from_tensor(parameter)
        # transformers marks parameters that need no initial values.
        vars(fake).update(vars(parameter))
        adopt(fake)
        return fake

    # A hook may return another parameter, which its type in torch does not say.
    handle = register_module_parameter_registration_hook(taken)  # type: ignore[arg-type]
    try:
        with replaced(safetensors.torch, "load_file", load_file):
            yield
    finally:
        handle.remove()


@contextlib.contextmanager
def few_numbers_known(mode: FakeTensorMode) -> Iterator[None]:
    """Within it, a few numbers of ``torch.linspace``, and what is computed from them alone, have content.

    Vision models make the rates at which their layers drop paths so, and read them while they are built.
    """

    usual = torch.linspace

    def linspace(*arguments: Any, **named: Any) -> torch.Tensor:
        found = usual(*arguments, **named)
        if found.numel() > _FEW or not isinstance(found, FakeTensor):
            return found
        with _disable_current_modes():
            known = usual(*arguments, **named)
        return mode.fake_tensor_converter.from_real_tensor(mode, known, make_constant=True)

    with replaced(torch, "linspace", linspace), replaced(fake_tensor, "CONSTANT_NUMEL_LIMIT", _FEW):
        yield


def _replace_in_deepspeed(stack: contextlib.ExitStack) -> None:
    from deepspeed.runtime.zero import partitioned_param_coordinator, stage3, stage_1_and_2

    # ZeRO 3 compares the order of modules with the other workers.
    stack.enter_context(replaced(partitioned_param_coordinator, "assert_ints_same_as_other_ranks", _nothing))
    for stage in (stage_1_and_2, stage3):
        if hasattr(stage, "is_invalid_grad_norm"):
            stack.enter_context(replaced(stage, "is_invalid_grad_norm", lambda _norm: False))


def _as_deepspeed_on_gpu(stack: contextlib.ExitStack) -> None:
    from deepspeed.accelerator import get_accelerator

    from ortlaunch.trainer.engines import zero_copies

    # Its own options and copies stay there.
    stack.enter_context(replaced(zero_copies, "options", lambda *_arguments, **_named: ({}, {})))
    stack.enter_context(replaced(zero_copies, "spare_copies", _nothing))
    stack.enter_context(replaced(get_accelerator(), "is_fp16_supported", lambda: True))


def settle(engine: Engine) -> None:
    """Takes from a built engine what it can do on real tensors only."""
    engine.guard.reads_values = False
    module = engine.module
    if isinstance(module, DistributedDataParallel):
        module.register_comm_hook(None, lambda _state, bucket: _exchanged(bucket))
        module.reducer = _Reducer(module.reducer)  # type: ignore[assignment]


@contextlib.contextmanager
def as_another_worker(engine: Engine) -> Iterator[bool]:
    """Within it, a checkpoint is what another worker than the first one makes of it; whether that is less."""
    # DeepSpeed's first worker writes the model for all, but under ZeRO 3.
    deep = getattr(engine, "_engine", None)
    if deep is None or deep.zero_optimization_partition_weights():
        yield False
        return
    deep.save_non_zero_checkpoint = False
    try:
        yield True
    finally:
        deep.save_non_zero_checkpoint = True


class _Reducer:
    """DDP's reducer, which does not order its buckets anew: it would read the order of the first worker.

    The new buckets have the size of those before.
    """

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def _exchanged(bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """The bucket itself, as if it had been exchanged in place."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _nothing(*_arguments: object, **_named: object) -> None:
    return


def _take_data(tensor: torch.Tensor, other: torch.Tensor) -> None:
    tensor.data = other.data


def _drawn_once(truncated: Any) -> Any:
    """``trunc_normal_``, which draws fake tensors once, within the bounds."""

    def drawn(tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> torch.Tensor:
        if not isinstance(tensor, FakeTensor):
            return truncated(tensor, mean, std, a, b, generator=generator)
        with torch.no_grad():
            tensor.normal_(mean, std)
            outside = (tensor < a) | (tensor > b)
            del outside  # It is a part of the peak.
        return tensor

    return drawn


def _outside(function: Any) -> Any:
    """The function, called on real tensors."""

    def called(*arguments: Any, **named: Any) -> Any:
        with _disable_current_modes():
            return function(*arguments, **named)

    return called


def _storage_key(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """As `ortlaunch.trainer.checkpoint.host.storage_key`, by the storage instead of its address."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if tensor.numel() == 0:
        return None
    place = tensor.untyped_storage()._cdata, tensor.storage_offset()
    return *place, tensor.element_size(), tuple(tensor.shape), tuple(tensor.stride())
