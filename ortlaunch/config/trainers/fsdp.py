"""``trainer=fsdp``: torch's fully sharded data parallelism (FSDP2, ``fully_shard``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ortlaunch.base.errors import RequestError
from ortlaunch.config.trainers.base import Trainer, TrainerConfig, Weights

if TYPE_CHECKING:
    from ortlaunch.config.schema import Config, Device, Precision


@dataclass(eq=False, repr=False)
class FsdpConfig(TrainerConfig):
    """torch's fully sharded data parallelism (FSDP2): parameters, gradients and optimizer state are sharded."""

    name: str = "fsdp"
    blocks: str | None = None
    """The blocks that are gathered one at a time, as a class name or a glob of module paths (model.layers.*); null
    finds the repeated blocks of transformers and similar models. A model without such blocks is gathered as a whole."""
    reshard_after_forward: bool = True
    """Free a block's parameters after its forward and gather them again for its backward. false keeps them until the
    backward, which needs the memory of the whole model and exchanges less."""
    accumulate_sharded: bool = False
    """With train.grad_accumulation: reduce gradients and free parameters after each micro-batch instead of after the
    last. No worker then holds all gradients, but workers exchange data in every micro-batch."""


class FsdpTrainer(Trainer[FsdpConfig]):
    """Each worker keeps its shard of every parameter, and holds a whole block only while the block runs."""

    schema = FsdpConfig
    engine = "ortlaunch.trainer.engines.fsdp_engine:FsdpEngine"
    places_model = True

    def zero_stage(self, cfg: FsdpConfig) -> int:
        return 3

    def check(self, config: Config, device: Device) -> None:
        reason = config.optimizer.whole_matrices
        if reason is not None:
            raise RequestError(
                f"optimizer={config.optimizer.name} does not go with trainer=fsdp: fsdp hands the optimizer shards, "
                f"and {reason}. Use optimizer=adamw or sgd, or trainer=ddp"
            )
        if getattr(config.backend, "fullgraph", False):
            raise RequestError(
                "backend.fullgraph=true does not go with trainer=fsdp, which gathers parameters between the graphs of "
                "the blocks: leave it out, or use trainer=ddp"
            )
        mode = getattr(config.backend, "mode", None)
        if mode in ("reduce-overhead", "max-autotune"):
            raise RequestError(
                f"backend.mode={mode} does not go with trainer=fsdp: CUDA graphs read parameters at fixed addresses, "
                "and fsdp frees and gathers them. Use backend.mode=default or max-autotune-no-cudagraphs, or "
                "trainer=ddp"
            )

    def state_bytes(self, cfg: FsdpConfig, weights: Weights, workers: int) -> int:
        return weights.buffers + (weights.parameters + weights.trained + weights.optimizer) // workers

    def refusal(self, backend: str, precision: Precision, variant: int | None) -> str | None:
        if backend == "ort":
            return (
                "backend=ort does not go with trainer=fsdp: fsdp frees a block's parameters after its forward, and "
                "ONNX Runtime's backward reads them where its forward found them. Use trainer=deepspeed "
                "trainer.zero_stage=3, which shards the same and runs on ONNX Runtime, or backend=eager or compile"
            )
        return None
