"""The wrapping order: the backend inside, the trainer around it, DataParallel nowhere.

plain model -> (ORTModule, compiled or eager) -> (DistributedDataParallel, DeepSpeed engine or single)

Under ZeRO 3 the ORTModules are inside the model's blocks instead of around the model.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import (
    BackendConfig,
    CompileConfig,
    Config,
    DdpConfig,
    DeepSpeedConfig,
    OrtConfig,
    TrainConfig,
)
from ortlaunch.models.checks import check_model, reject_data_parallel
from ortlaunch.models.recompute import recompute_activations
from ortlaunch.models.task import Task
from ortlaunch.run.run import Run
from ortlaunch.trainer.engine import Engine
from ortlaunch.trainer.engines.deepspeed_engine import DeepSpeedEngine
from ortlaunch.trainer.engines.torch_engine import TorchEngine
from ortlaunch.trainer.workers import Workers


def wrap(model: torch.nn.Module, config: Config, workers: Workers, task: Task, run_dir: Path) -> Engine:
    """Wraps a plain model in the one order that works: backend first, trainer around it."""
    inner = wrap_backend(
        model.to(workers.device),
        config.backend,
        threads=workers.threads,
        # Every worker has the same graphs, so the first one's stand for all.
        onnx_dir=Run(run_dir).onnx if workers.is_first else None,
        zero_stage=config.trainer.zero_stage if isinstance(config.trainer, DeepSpeedConfig) else 0,
        train=config.train,
    )
    return wrap_trainer(inner, config, workers, task)


def wrap_backend(
    model: torch.nn.Module,
    cfg: BackendConfig,
    *,
    threads: int,
    onnx_dir: Path | None,
    zero_stage: int = 0,
    train: TrainConfig | None = None,
) -> torch.nn.Module:
    """Hands forward and backward of a plain model to the backend.

    Args:
        model: a plain model on its device.
        cfg: which backend.
        threads: this worker's share of the cores, for a backend with a thread pool of its own.
        onnx_dir: where ``backend.debug.save_onnx`` leaves its graphs; None on a worker that leaves none.
        zero_stage: what will shard the parameters: at 3 they are whole only while their module runs, so ONNX Runtime
            gets the model's blocks one by one, and the model itself is returned.
        train: whether to checkpoint activations; None for no.

    Raises:
        RequestError: the model is wrapped already, holds a DataParallel, or has no blocks where it needs them.
    """
    check_model(model)
    train = train or TrainConfig()
    if isinstance(cfg, OrtConfig):
        # Imported only where asked for: it takes seconds and need not be installed.
        from ortlaunch.ort import session

        wrap_ort = session.wrap_blocks if zero_stage == 3 else session.wrap
        return wrap_ort(
            model,
            cfg,
            threads=threads,
            onnx_dir=onnx_dir,
            recompute=train.activation_checkpointing,
        )
    if train.activation_checkpointing:
        recompute_activations(model)
    if isinstance(cfg, CompileConfig):
        _check_compiles(model)
        # In place, so that parameters keep their names.
        model.compile(mode=None if cfg.mode == "default" else cfg.mode, fullgraph=cfg.fullgraph)
    return model


def _check_compiles(model: torch.nn.Module) -> None:
    """Refuses what ends in a NameError within torch's compiler, a minute into the run (seen on torch 2.6.0)."""
    if torch.__version__.startswith("2.6.") and type(model).__module__.startswith("transformers."):
        raise RequestError(
            f"backend=compile: torch {torch.__version__} cannot compile the models of the installed transformers: take "
            "backend=eager or ort, or a newer torch"
        )


def wrap_trainer(inner: torch.nn.Module, config: Config, workers: Workers, task: Task) -> Engine:
    """Puts the trainer around what `wrap_backend` returned.

    Raises:
        RequestError: a DataParallel is somewhere in the module.
    """
    reject_data_parallel(inner)
    if isinstance(config.trainer, DeepSpeedConfig):
        return DeepSpeedEngine(inner, config, config.trainer, workers, task)
    ddp = config.trainer if isinstance(config.trainer, DdpConfig) else None
    return TorchEngine(inner, config, ddp, workers, task)
