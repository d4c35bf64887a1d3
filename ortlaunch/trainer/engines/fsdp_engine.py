"""The engine of ``trainer=fsdp``: torch's ``torch.distributed.fsdp.fully_shard`` (FSDP2)."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import Config, Precision
from ortlaunch.config.trainers.fsdp import FsdpConfig
from ortlaunch.models.blocks import Blocks, repeated_blocks
from ortlaunch.models.checks import refuse_kinds
from ortlaunch.models.strides import make_contiguous
from ortlaunch.models.task import Batch, Task
from ortlaunch.trainer.buffers import first_workers_buffers, plain_buffers, take_first_workers
from ortlaunch.trainer.checkpoint.host import to_host
from ortlaunch.trainer.checkpoint.torch_state import state_of
from ortlaunch.trainer.engines import fsdp_compat
from ortlaunch.trainer.engines.torch_engine import TorchEngine
from ortlaunch.trainer.own_optimizers import parts_of
from ortlaunch.trainer.precision import DTYPES, cast_inputs
from ortlaunch.trainer.statistics import with_statistics
from ortlaunch.trainer.workers import Workers

_DIGEST = 2**50 - 1
"""Of a hash, the bits that a floating-point number holds."""


class FsdpEngine(TorchEngine):
    """Every worker keeps a shard of parameters, gradients and optimizer state. A block is gathered while it runs."""

    _in_pieces = "trainer=fsdp"

    def __init__(
        self,
        inner: nn.Module,
        config: Config,
        workers: Workers,
        task: Task,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        cfg = config.trainer
        assert isinstance(cfg, FsdpConfig)
        self._cfg = cfg
        self._exchanges = True
        self._workers = workers
        self._used = 0
        """A hash of which weights each step has used."""
        super().__init__(inner, config, workers, task, optimizer)
        _without_missing_kernels(self._optimizer)
        self._masks_on_device = self._masks_on_device and bool(self._optimizer.defaults.get("fused"))

    def _distribute(self, config: Config, workers: Workers) -> nn.Module:
        if workers.device.type == "cpu":
            fsdp_compat.complete()
        refuse_kinds(self.inner, "trainer=fsdp", "complex", "empty", "scalar")
        # FSDP refuses any other weights.
        make_contiguous(self.inner)
        # A worker may have drawn other ones, and FSDP sends none.
        take_first_workers((*self.inner.parameters(), *plain_buffers(self.inner).values()), workers.device)
        mesh = init_device_mesh(workers.device.type, (workers.world_size,))
        low = None if self._precision is Precision.fp32 else DTYPES[self._precision]
        if low is not None and (norms := with_statistics(self.inner)):
            # Batch normalization keeps its statistics in fp32, so its weights must stay in fp32 too. These modules form
            # one group because each of them is small.
            fully_shard(list[nn.Module](norms), mesh=mesh)
        # Gradients are summed in fp32, in whatever precision they were computed.
        in_blocks = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None)
        for block in _apart(self.inner, repeated_blocks(self.inner, self._cfg.blocks, "trainer.blocks")).values():
            fully_shard(block, mesh=mesh, reshard_after_forward=self._cfg.reshard_after_forward, mp_policy=in_blocks)
        # `model_inputs` casts the inputs of the whole model, because it can tell labels from inputs. FSDP keeps the
        # root's gathered parameters after the forward, because the root's backward follows at once.
        at_root = MixedPrecisionPolicy(in_blocks.param_dtype, in_blocks.reduce_dtype, cast_forward_inputs=False)
        fully_shard(self.inner, mesh=mesh, mp_policy=at_root)
        return self.inner

    def exchange(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        exchanges = last or self._cfg.accumulate_sharded
        if exchanges is not self._exchanges:
            assert isinstance(self.inner, FSDPModule)
            self.inner.set_requires_gradient_sync(exchanges)
            # Without an exchange, the next micro-batch's forward uses the parameters that this backward gathered.
            self.inner.set_reshard_after_backward(exchanges)
            self._exchanges = exchanges
        return contextlib.nullcontext()

    def step(self) -> torch.Tensor | float | None:
        self._used = hash((self._used, *(parameter.grad is None for parameter in self._parameters))) & _DIGEST
        return super().step()

    def check_agreement(self) -> None:
        if len(set(self._workers.gather([float(self._used)]).flatten().tolist())) > 1:
            raise RequestError(
                "trainer=fsdp: since the last log step, batches have decided which weights their worker uses, and FSDP "
                "adds gradients to other weights then: use trainer=ddp with trainer.find_unused_parameters=true"
            )

    def model_inputs(self, batch: Batch) -> Batch:
        return cast_inputs(batch, self._precision)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        with first_workers_buffers(self.inner), super().evaluating():
            yield
        # No backward follows an evaluation, so the parameters that the last forward gathered are freed here.
        for module in self.inner.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def precision_context(self) -> contextlib.AbstractContextManager[Any]:
        # FSDP gathers the parameters in the model's precision, so autocast is not needed.
        return contextlib.nullcontext()

    def weights(self) -> dict[str, torch.Tensor]:
        whole: dict[int, torch.Tensor] = {}
        state = state_of(self.inner, trained_only=self._trained_only)
        for value in state.values():
            if id(value) in whole:
                continue  # This is another name of the same weight.
            shown = self._shown(value)
            full = shown.full_tensor().detach() if isinstance(shown, DTensor) else shown
            whole[id(value)] = to_host(full) if self._is_first else torch.empty(0)
        return {name: whole[id(value)] for name, value in state.items()} if self._is_first else {}


def _apart(model: nn.Module, blocks: Blocks) -> Blocks:
    """The blocks that share no parameter with another module. The root gathers shared parameters."""
    holders = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    of_block = {
        path: Counter(id(p) for module in block.modules() for p in module.parameters(recurse=False))
        for path, block in blocks.items()
    }
    return {
        path: block
        for path, block in blocks.items()
        if all(holders[key] == count for key, count in of_block[path].items())
    }


def _without_missing_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Switches fused SGD off, because torch has no kernel of it for sharded parameters."""
    for part in parts_of(optimizer):
        if isinstance(part, torch.optim.SGD):
            for settings in (part.defaults, *part.param_groups):
                settings["fused"] = False
