"""The engine of ``trainer=ddp``: torch's DistributedDataParallel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import Config, OrtConfig
from ortlaunch.config.trainers.ddp import DdpConfig
from ortlaunch.models import registry
from ortlaunch.models.task import Batch
from ortlaunch.trainer import shared_memory
from ortlaunch.trainer.buffers import plain_buffers, take_first_workers
from ortlaunch.trainer.engines import ddp_exchange
from ortlaunch.trainer.engines.torch_engine import TorchEngine
from ortlaunch.trainer.used import UsedWeights, in_words
from ortlaunch.trainer.workers import Workers


class DdpEngine(TorchEngine):
    """Every worker holds the whole model, and gradients are averaged over the workers."""

    module: DistributedDataParallel
    sends_buffers = True
    _left_out: tuple[torch.nn.Parameter, ...] = ()
    """The parameters that had no gradient in the first backward under ONNX Runtime."""

    def _distribute(self, config: Config, workers: Workers) -> DistributedDataParallel:
        cfg = config.trainer
        self._may_leave_out = isinstance(config.backend, OrtConfig)
        assert isinstance(cfg, DdpConfig)
        searches = cfg.find_unused_parameters or has_static_graph(config, cfg)
        self._used = None if searches else UsedWeights(self.inner, with_gradient=False)
        module = DistributedDataParallel(
            self.inner,
            device_ids=[workers.device.index] if workers.device.type == "cuda" else None,
            bucket_cap_mb=cfg.bucket_cap_mb,
            find_unused_parameters=cfg.find_unused_parameters,
            static_graph=has_static_graph(config, cfg),
            gradient_as_bucket_view=True,
        )
        memory = shared_memory.connect(workers) if cfg.shared_memory else None
        if memory is not None:
            ddp_exchange.exchange_by(memory, module)
        return module

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        with self._noting_left_out() if self._may_leave_out else contextlib.nullcontext():
            super().backward(loss, last=last)
        self._check_used(exchanged=last)

    def _check_used(self, *, exchanged: bool) -> None:
        """Names the weights that a backward has not reached. DDP waits for their gradients on the other workers."""
        if self._used is not None and (unused := self._used.take_unused()) and exchanged:
            raise RequestError(
                f"trainer=ddp: a step's loss does not depend on {in_words(unused)}: set "
                "trainer.find_unused_parameters=true, or call requires_grad_(False) on what is not to be trained"
            )

    def step(self) -> torch.Tensor | float | None:
        for parameter in self._left_out:
            # DDP refuses weights that the loss does not depend on. In ONNX Runtime's graph those of a part without
            # gradients look as if it did, and DDP gives them zeros, with which they decay. A later graph may use them.
            if parameter.grad is not None and not parameter.grad.any():
                parameter.grad = None
        return super().step()

    @contextlib.contextmanager
    def _noting_left_out(self) -> Iterator[None]:
        """Finds the parameters that a backward gives no gradient, before DDP gives them one."""
        self._may_leave_out = False
        given: set[int] = set()

        def note(number: int, gradient: torch.Tensor | None) -> None:
            # The hook is called without a gradient too.
            if gradient is not None:
                given.add(number)

        hooks = [one.register_hook(partial(note, number)) for number, one in enumerate(self._parameters)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._left_out = tuple(one for number, one in enumerate(self._parameters) if number not in given)

    def exchange(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        # The context must include the forward, in which DDP decides whether the backward exchanges gradients.
        return contextlib.nullcontext() if last else self.module.no_sync()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        # Each worker's last batch has changed its own buffers. All workers take the first worker's buffers, as DDP does
        # before a forward in training. They then evaluate the model that checkpoints and weights hold.
        take_first_workers(plain_buffers(self.inner).values())
        with super().evaluating():
            yield

    def warm_up(self, batch: Batch) -> None:
        # DDP rebuilds its buckets after the first backward, in the order in which the gradients became ready. With more
        # than two workers, the buckets determine the order of the sums and so their rounding. A resumed run therefore
        # needs the same buckets from its first step. With a static graph, DDP learns the order in the second backward.
        for _ in range(2):
            self._forward(batch).loss.backward()
            self._check_used(exchanged=True)
            self._optimizer.zero_grad(set_to_none=True)


def has_static_graph(config: Config, cfg: DdpConfig) -> bool:
    """Whether DDP may assume that all steps use the same graph.

    ``trainer.static_graph`` decides; null means yes for registered models with a static graph, but not with gradient
    accumulation. DDP learns the graph in the first backward, and that micro-batch would not exchange gradients.
    """
    if cfg.static_graph is not None:
        return cfg.static_graph
    model = registry.find(config.model.name)
    return model is not None and model.static_graph and config.train.grad_accumulation == 1
