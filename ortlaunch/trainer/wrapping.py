"""Wraps a model in the right order: first the backend, then the trainer. DataParallel is refused.

plain model -> (ORTModule, compiled or eager) -> (the engine of one of `ortlaunch.config.trainers`)

With ZeRO 3, the backend wraps the model's blocks in ORTModules instead of the whole model.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import (
    BackendConfig,
    CompileConfig,
    Config,
    OrtConfig,
    TrainConfig,
)
from ortlaunch.config.trainers import trainer_of
from ortlaunch.config.trainers.base import loaded
from ortlaunch.models.checks import check_model, reject_data_parallel
from ortlaunch.models.recompute import recompute_activations
from ortlaunch.models.task import Task
from ortlaunch.run.run import Run
from ortlaunch.trainer.engine import Engine
from ortlaunch.trainer.workers import Workers


def wrap(
    model: torch.nn.Module,
    config: Config,
    workers: Workers,
    task: Task,
    run_dir: Path,
    optimizer: torch.optim.Optimizer | None = None,
) -> Engine:
    """Wraps a plain model in the only order that works: the backend, then the trainer around it.

    With an optimizer, which a script has made for the model, that one is used in place of the configured one.
    """
    trainer = trainer_of(config.trainer)
    inner = wrap_backend(
        model if trainer.places_model else model.to(workers.device),
        config.backend,
        threads=workers.threads,
        # Every worker has the same graphs, so only the first one writes them.
        onnx_dir=Run(run_dir).onnx if workers.is_first else None,
        zero_stage=trainer.zero_stage(config.trainer),
        train=config.train,
    )
    return wrap_trainer(inner, config, workers, task, optimizer)


def wrap_backend(
    model: torch.nn.Module,
    cfg: BackendConfig,
    *,
    threads: int,
    onnx_dir: Path | None,
    zero_stage: int = 0,
    train: TrainConfig | None = None,
) -> torch.nn.Module:
    """Makes the backend execute forward and backward of a plain model.

    Args:
        model: a plain model on its device.
        cfg: the backend's configuration.
        threads: this worker's share of the cores, for a backend with its own thread pool.
        onnx_dir: the folder for the graphs of ``backend.debug.save_onnx``; None on a worker that writes none.
        zero_stage: how the trainer will shard the model. At stage 3, parameters are whole only while their module runs.
            ONNX Runtime therefore gets the model's blocks one by one, and the model itself is returned.
        train: the training node, which says whether to checkpoint activations; None means no.

    Raises:
        RequestError: the model is already wrapped, contains a DataParallel, or has no blocks at ZeRO stage 3.
    """
    check_model(model)
    train = train or TrainConfig()
    if isinstance(cfg, OrtConfig):
        # The import is here because it takes seconds and ONNX Runtime need not be installed.
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
        # The model is compiled in place, so that parameters keep their names.
        model.compile(mode=None if cfg.mode == "default" else cfg.mode, fullgraph=cfg.fullgraph)
    return model


def _check_compiles(model: torch.nn.Module) -> None:
    """Refuses transformers models on torch 2.6, whose compiler would raise a NameError a minute into the run."""
    if torch.__version__.startswith("2.6.") and type(model).__module__.startswith("transformers."):
        raise RequestError(
            f"backend=compile: torch {torch.__version__} cannot compile the models of the installed transformers: take "
            "backend=eager or ort, or a newer torch"
        )


def wrap_trainer(
    inner: torch.nn.Module,
    config: Config,
    workers: Workers,
    task: Task,
    optimizer: torch.optim.Optimizer | None = None,
) -> Engine:
    """Puts the trainer around what `wrap_backend` returned; the arguments are those of `wrap`.

    Raises:
        RequestError: the module contains a DataParallel.
    """
    reject_data_parallel(inner)
    engine: Engine = loaded(trainer_of(config.trainer).engine)(inner, config, workers, task, optimizer)
    return engine
