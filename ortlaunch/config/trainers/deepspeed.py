"""``trainer=deepspeed``: DeepSpeed with ZeRO 0 to 3."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ortlaunch.base.errors import RequestError
from ortlaunch.config.bounds import number
from ortlaunch.config.trainers.base import Trainer, TrainerConfig, Variants, Weights

if TYPE_CHECKING:
    from ortlaunch.config.schema import Config, Device, OptimizerConfig, Precision


_OURS = {
    "train_batch_size": "train.batch_size and train.grad_accumulation",
    "train_micro_batch_size_per_gpu": "train.batch_size",
    "gradient_accumulation_steps": "train.grad_accumulation",
    "gradient_clipping": "train.clip_grad_norm",
    "bf16.enabled": "train.precision",
    "fp16.enabled": "train.precision",
    "optimizer": "optimizer=NAME and its keys",
    "scheduler": "scheduler=NAME and its keys",
    # ONNX Runtime would compute wrong gradients with a stage that it does not know of.
    "zero_optimization.stage": "trainer.zero_stage",
    "zero_optimization.offload_optimizer": "trainer.offload_optimizer",
}
"""DeepSpeed's keys for what ortlaunch has keys of its own, which the rest of the program reads, by those keys."""


@dataclass(eq=False, repr=False)
class DeepSpeedConfig(TrainerConfig):
    """DeepSpeed with the Zero Redundancy Optimizer."""

    name: str = "deepspeed"
    zero_stage: int = number(1, least=0, most=3)
    """0 replicates everything; 1 shards the optimizer state, 2 also gradients, 3 also parameters."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in host memory and run its step on the CPU (ZeRO 1 to 3 on CUDA)."""
    shared_memory: bool = True
    """Exchange sums on the CPU between up to four workers of one machine through memory that they share; false means
    through gloo, as between machines."""
    config: dict[str, Any] = field(default_factory=dict)
    """Keys of DeepSpeed's own configuration. They override those that ortlaunch generates; what has a key of its own in
    ortlaunch is refused."""


class DeepSpeedTrainer(Trainer[DeepSpeedConfig]):
    """DeepSpeed, which handles the optimizer, the loss scale and the checkpoint's files itself."""

    schema = DeepSpeedConfig
    engine = "ortlaunch.trainer.engines.deepspeed_engine:DeepSpeedEngine"
    weights_reader = "ortlaunch.trainer.checkpoint.deepspeed_state:read_weights"
    packages = ("deepspeed",)
    # DeepSpeed's autotuner imports it: 1.3 s of each worker's start.
    unneeded = ("mlflow",)
    variants = Variants("zero_stage", "z", (0, 1, 2, 3))
    # DeepSpeed takes the loss scale from a checkpoint: fp16 would go on with the scale of 1 of another precision.
    keeps_precision = True

    def zero_stage(self, cfg: DeepSpeedConfig) -> int:
        return cfg.zero_stage

    def check(self, config: Config, device: Device) -> None:
        cfg = config.trainer
        assert isinstance(cfg, DeepSpeedConfig)
        _check_keys(cfg)
        reason = config.optimizer.whole_matrices
        if reason is not None and cfg.zero_stage > 0:
            raise RequestError(
                f"optimizer={config.optimizer.name} does not go with trainer.zero_stage={cfg.zero_stage}: ZeRO hands "
                f"the optimizer flat pieces, and {reason}. Use optimizer=adamw, or trainer=ddp"
            )
        _check_offload(cfg, device)
        if config.train.ema is not None:
            raise RequestError(
                f"train.ema={config.train.ema:g} does not go with trainer=deepspeed, which keeps the weights that it "
                "trains, and their checkpoints, in a form of its own: use trainer=ddp, or trainer=fsdp, which shards "
                "the average too"
            )

    def refusal(self, backend: str, precision: Precision, variant: int | None) -> str | None:
        if precision.value == "fp16" and variant == 0:
            return (
                "train.precision=fp16 does not go with trainer.zero_stage=0: there DeepSpeed divides the gradients by "
                "a loss scale that it never multiplied the loss with. Use trainer.zero_stage=1, or trainer=ddp"
            )
        return None

    def checkpoint_kind(self, cfg: DeepSpeedConfig) -> str:
        return f"trainer=deepspeed trainer.zero_stage={cfg.zero_stage}"

    def without_offload(self, cfg: DeepSpeedConfig) -> DeepSpeedConfig:
        return replace(cfg, offload_optimizer=False)

    def state_bytes(self, cfg: DeepSpeedConfig, weights: Weights, workers: int) -> int:
        stage = cfg.zero_stage
        if stage == 0 and weights.low_share == 1:
            return super().state_bytes(cfg, weights, workers)
        parameters, gradients = (int(weights.low_share * one) for one in (weights.parameters, weights.trained))
        # The optimizer works on a copy of the weights in fp32, also where they are in fp32 themselves.
        optimizer = weights.trained + weights.optimizer
        parameters //= workers if stage > 2 else 1
        gradients //= workers if stage > 1 else 1
        optimizer //= workers if stage > 0 else 1
        if cfg.offload_optimizer:
            # Sharded gradients go to the host as well.
            optimizer, gradients = 0, gradients if stage == 1 else 0
        return weights.buffers + parameters + gradients + optimizer

    def same_workers_reason(self, cfg: DeepSpeedConfig, optimizer: OptimizerConfig) -> str | None:
        has_others = any(one.target is not None for one in optimizer.groups)
        is_free = cfg.zero_stage == 0 or (optimizer.can_be_resharded and not has_others)
        return None if is_free else "DeepSpeed can redistribute the state of AdamW only"


def _check_keys(cfg: DeepSpeedConfig) -> None:
    for key, instead in _OURS.items():
        node: Any = cfg.config
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        if node is not None:
            raise RequestError(f"trainer.config.{key}: set {instead} instead")


def _check_offload(cfg: DeepSpeedConfig, device: Device) -> None:
    if not cfg.offload_optimizer:
        return
    if cfg.zero_stage == 0:
        raise RequestError("trainer.offload_optimizer=true needs trainer.zero_stage=1, 2 or 3: stage 0 shards nothing")
    if device.value != "cuda":
        raise RequestError(
            "trainer.offload_optimizer=true moves the optimizer from the GPU's memory to the host's: on the CPU it is "
            "there already. Leave it out, or use device=cuda"
        )
