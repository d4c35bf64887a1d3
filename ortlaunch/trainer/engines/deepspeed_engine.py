"""The engine of ``trainer=deepspeed``: DeepSpeed with ZeRO 0 to 3."""

from __future__ import annotations

import contextlib
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import Config, Precision
from ortlaunch.config.trainers.deepspeed import DeepSpeedConfig
from ortlaunch.models.checks import refuse_kinds
from ortlaunch.models.modes import evaluation
from ortlaunch.models.strides import make_contiguous
from ortlaunch.models.task import Batch, Task
from ortlaunch.trainer import shared_memory
from ortlaunch.trainer.buffers import first_workers_buffers, plain_buffers, take_first_workers
from ortlaunch.trainer.checkpoint.host import HostMemory
from ortlaunch.trainer.checkpoint.torch_state import Write
from ortlaunch.trainer.engine import Engine
from ortlaunch.trainer.engines import deepspeed_exchange, zero_copies
from ortlaunch.trainer.given_optimizer import names_in, optimizer_of
from ortlaunch.trainer.gradients import clip_
from ortlaunch.trainer.guard import Guard
from ortlaunch.trainer.optimizers import masks_on_device, settings_kept
from ortlaunch.trainer.precision import cast_inputs
from ortlaunch.trainer.schedules import rate_of
from ortlaunch.trainer.statistics import normalize_in_fp32
from ortlaunch.trainer.used import UsedWeights, in_words
from ortlaunch.trainer.workers import Workers

_REMEDY = (
    "DeepSpeed would add gradients to other weights, and move weights without one. Use trainer=ddp with "
    "trainer.find_unused_parameters=true, or trainer=fsdp if all workers use the same weights in a step"
)


class DeepSpeedEngine(Engine):
    """DeepSpeed with ZeRO 0 to 3."""

    counts_micro_batches = True

    def __init__(
        self,
        inner: torch.nn.Module,
        config: Config,
        workers: Workers,
        task: Task,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        import deepspeed

        cfg = config.trainer
        assert isinstance(cfg, DeepSpeedConfig)
        # On the CPU, DeepSpeed would use its own shared-memory collective. Its compilation at the first run takes half
        # a minute and needs a compiler. It spins, and trains no faster than gloo (gpt2_nano, ZeRO 1, two workers on
        # four cores).
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        _check_precision(config.train.precision)
        if cfg.zero_stage == 3:
            refuse_kinds(inner, "trainer=deepspeed trainer.zero_stage=3", "complex", "empty")
        else:
            refuse_kinds(inner, "trainer=deepspeed", "complex")
        self.inner = inner
        self.guard = Guard(workers.device)
        self._is_first = workers.is_first
        self.task = task
        self._precision = config.train.precision
        self._trained_only = not config.adapter.trains_all
        self._clip = config.train.clip_grad_norm
        self._is_plain = _is_plain(config, cfg)
        self._workers = workers
        self._used = UsedWeights(inner, with_gradient=True)
        self._unused: frozenset[str] | None = None
        """The weights that no micro-batch uses; None before the first one."""
        self._parameters = [parameter for parameter in inner.parameters() if parameter.requires_grad]
        in_pieces = None if self._is_plain else f"trainer=deepspeed trainer.zero_stage={cfg.zero_stage}"
        self._optimizer, self._scheduler = optimizer_of(
            config, inner, optimizer, names_in(optimizer, inner), in_pieces=in_pieces
        )
        self._peak = config.optimizer.lr
        self._decays = any(group["weight_decay"] for group in self._optimizer.param_groups)
        self._masks_on_device = masks_on_device(self._optimizer, workers.device)
        if config.train.precision is not Precision.fp32:
            # DeepSpeed casts parameters and leaves buffers in fp32.
            normalize_in_fp32(inner)
        # DeepSpeed cannot send other weights to the other workers, and sends no buffers.
        make_contiguous(inner)
        take_first_workers(plain_buffers(inner).values())
        # DeepSpeed's output belongs in the log, not on the terminal.
        with contextlib.redirect_stdout(sys.stderr), _no_step_taken(self._optimizer), _scalars_broadcast(inner):
            self._engine, _, _, _ = deepspeed.initialize(
                model=inner,
                optimizer=self._optimizer,
                lr_scheduler=self._scheduler,
                config=deepspeed_config(config, cfg, sum(one.numel() for one in self._parameters), workers.device),
                dist_init_required=False,
            )
        self.module = self._engine
        memory = shared_memory.connect(workers) if cfg.shared_memory else None
        deepspeed_exchange.sum_by(memory)
        zero_copies.spare_copies(self._engine.optimizer, memory)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        # DeepSpeed counts the micro-batches itself. ZeRO 0 and 1 exchange gradients at the last micro-batch. ZeRO 2 and
        # 3 exchange them at each one, because a worker keeps only its shard.
        self._engine.backward(self.guard.watch(loss))
        self._check_used()
        if not last:
            self._engine.step()

    def _check_used(self) -> None:
        """Refuses a model whose workers, or micro-batches, use different weights.

        DeepSpeed adds gradients to the wrong weights where workers use others, and moves weights that are not used by
        their momentum and decay.
        """
        unused = self._used.take_unused()
        if self._unused is None:
            self._unused = unused
            everyone = self._workers.gather([float(zlib.crc32(",".join(sorted(unused)).encode()))])
            if len(set(everyone.flatten().tolist())) > 1:
                raise RequestError(f"trainer=deepspeed: a batch decides which weights its worker uses: {_REMEDY}")
            if unused and self._decays:
                raise RequestError(
                    f"trainer=deepspeed: the loss does not depend on {in_words(unused)}, and DeepSpeed would decay "
                    "them: call requires_grad_(False) on what is not to be trained, or set optimizer.weight_decay=0. "
                    "If other batches use them, use trainer=ddp with trainer.find_unused_parameters=true"
                )
        if unused != self._unused:
            raise RequestError(
                f"trainer=deepspeed: a batch decides whether its loss depends on {in_words(unused ^ self._unused)}: "
                f"{_REMEDY}"
            )

    def step(self) -> torch.Tensor | float | None:
        return self._plain_step() if self._is_plain else self._sharded_step()

    @property
    def evaluated(self) -> torch.nn.Module:
        return self.module

    def model_inputs(self, batch: Batch) -> Batch:
        return cast_inputs(batch, self._precision)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        with first_workers_buffers(self.inner), evaluation(self._engine), torch.no_grad():
            yield

    @property
    def lr(self) -> float:
        return rate_of(self._optimizer, self._scheduler, self._peak)

    @property
    def loss_scale(self) -> float | None:
        if self._precision is not Precision.fp16:
            return None
        return float(self._engine.optimizer.loss_scale)

    def _plain_step(self) -> torch.Tensor:
        norm = clip_(self._parameters, self._clip)
        finite = torch.isfinite(norm)
        self.guard.check_gradients(finite)
        if self._masks_on_device:
            self._optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
            self._optimizer.grad_scale = None  # type: ignore[attr-defined]
        elif not bool(finite):
            self.known_discarded = True
            # Optimizers skip parameters without a gradient.
            self._engine.zero_grad()
        self._engine.step()
        return norm

    def _sharded_step(self) -> torch.Tensor | float | None:
        # DeepSpeed reads the norm on the host at every step, and skips the update if the norm is not finite.
        self._engine.step()
        if self._precision is not Precision.fp16 and self._engine.optimizer.overflow:
            self.guard.check_gradients(False)
            self.known_discarded = True
        return self._engine.get_global_grad_norm()

    def snapshot(self, folder: Path, *, shared: bool, memory: HostMemory) -> Write:
        from ortlaunch.trainer.checkpoint import deepspeed_state

        return deepspeed_state.snapshot(
            self._engine, folder, trained_only=self._trained_only, shared=shared, memory=memory
        )

    def restore(self, folder: Path, saved_workers: int, scratch: Path, group: dist.ProcessGroup) -> None:
        from ortlaunch.trainer.checkpoint import deepspeed_state

        wrapped = self._engine.optimizer
        largest_norm = getattr(wrapped, "clip_grad", None)
        with settings_kept(self._optimizer, self._scheduler):
            deepspeed_state.restore(
                self._engine,
                folder,
                saved_workers=saved_workers,
                scratch=scratch,
                group=group,
                trained_only=self._trained_only,
            )
        if largest_norm is not None:
            # DeepSpeed takes this from the checkpoint, too.
            wrapped.clip_grad = largest_norm

    def weights(self) -> dict[str, torch.Tensor]:
        from ortlaunch.trainer.checkpoint import deepspeed_state

        return deepspeed_state.weights(self._engine, is_first=self._is_first, trained_only=self._trained_only)


def deepspeed_config(config: Config, cfg: DeepSpeedConfig, elements: int, device: torch.device) -> dict[str, Any]:
    """DeepSpeed's configuration for this run, with the user's ``trainer.config`` merged over it.

    https://www.deepspeed.ai/docs/config-json/

    Args:
        config: the run's configuration.
        cfg: its part for the trainer.
        elements: of all gradients together.
        device: the workers'.
    """
    is_fp32 = config.train.precision is Precision.fp32
    general, zero = zero_copies.options(cfg.zero_stage, elements, device, is_fp32=is_fp32)
    generated = {
        **general,
        "train_micro_batch_size_per_gpu": config.train.batch_size,
        "gradient_accumulation_steps": config.train.grad_accumulation,
        "gradient_clipping": 0.0 if _is_plain(config, cfg) else config.train.clip_grad_norm or 0.0,
        "zero_optimization": {**_zero(cfg), **zero},
        "bf16": {"enabled": config.train.precision is Precision.bf16},
        "fp16": {"enabled": config.train.precision is Precision.fp16},
        # The optimizers are torch's own, on the CPU too. DeepSpeed has not tested all of them.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # The throughput timer waits for the device twice per micro-step.
        "timers": {"throughput": {"enabled": False}},
        "wall_clock_breakdown": False,
        "steps_per_print": 2**31 - 1,
    }
    merged = OmegaConf.to_container(OmegaConf.merge(generated, cfg.config), resolve=True)
    assert isinstance(merged, dict)
    return {str(key): value for key, value in merged.items()}


def _zero(cfg: DeepSpeedConfig) -> dict[str, Any]:
    options: dict[str, Any] = {"stage": cfg.zero_stage}
    if cfg.offload_optimizer:
        options["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return options


def _is_plain(config: Config, cfg: DeepSpeedConfig) -> bool:
    """Whether DeepSpeed leaves the optimizer unwrapped, which is so at stage 0 in fp32.

    It then does not return the gradient norm, and it steps even if the norm is not finite. This engine therefore clips
    the gradients and protects the weights itself.
    """
    return cfg.zero_stage == 0 and config.train.precision is Precision.fp32


@contextlib.contextmanager
def _no_step_taken(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Undoes the optimizer step with zero gradients that DeepSpeed takes while it is initialized.

    DeepSpeed creates the optimizer's state by this step at stage 0 in bf16. The step would decay the weights, and AdamW
    would treat the first real step as the second in its bias correction.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    yield
    optimizer.state.clear()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


@contextlib.contextmanager
def _scalars_broadcast(model: torch.nn.Module) -> Iterator[None]:
    """Has DeepSpeed broadcast weights without dimensions, which it cannot view as bytes, as vectors of one element."""
    from deepspeed.runtime.engine import DeepSpeedEngine as Whole
    from deepspeed.runtime.zero.partition_parameters import Init as Partitioned

    scalars = [parameter for parameter in model.parameters() if parameter.dim() == 0]

    def shape(size: tuple[int, ...]) -> None:
        for scalar in scalars:
            if scalar.numel():  # Else it has been partitioned.
                scalar.data = scalar.data.view(size)
            elif hasattr(scalar, "ds_shape"):
                scalar.ds_shape = torch.Size(size)

    def as_vectors(broadcast: Callable[..., None]) -> Callable[..., None]:
        def called(*arguments: Any) -> None:
            shape((1,))
            broadcast(*arguments)
            shape(())

        return called

    methods = Whole._broadcast_model, Partitioned._zero_init_param
    if scalars:
        Whole._broadcast_model, Partitioned._zero_init_param = map(as_vectors, methods)
    try:
        yield
    finally:
        Whole._broadcast_model, Partitioned._zero_init_param = methods


def _check_precision(precision: Precision) -> None:
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if precision is Precision.fp16 and not accelerator.is_fp16_supported():
        raise RequestError(
            f"train.precision=fp16: DeepSpeed does not run it on this {accelerator.device_name()}, which has no "
            "instructions for it: use bf16 or fp32, or trainer=ddp"
        )
