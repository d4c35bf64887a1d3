"""Loads the model to export, its weights, and real batches to trace and test it with."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.base.modules import add_working_folder
from ortlaunch.config.load import load_config
from ortlaunch.config.schema import Config
from ortlaunch.data.batch import Batch, described, is_flat
from ortlaunch.export.request import Request
from ortlaunch.export.run_weights import weights_in
from ortlaunch.run import checkpoints as store
from ortlaunch.run import manifest
from ortlaunch.run.run import Run
from ortlaunch.trainer.prepare import build_seeded, first_batches
from ortlaunch.trainer.weights import load_weights

SAMPLES = 4
"""Samples in each batch; BatchNorm needs more than one."""


@dataclass(frozen=True)
class ExportSource:
    """The input of an export."""

    config: Config
    model: torch.nn.Module
    batches: list[Batch]
    """Three batches of `SAMPLES` samples each."""
    weights: str
    """Where the weights come from, in words."""


def open_source(request: Request) -> ExportSource:
    """Builds the model, loads its weights and reads batches.

    Raises:
        RequestError: the model, its weights or the data cannot be loaded.
    """
    config = request.config
    model = built(config)
    weights = _load(model, request)
    batches = first_batches(config, SAMPLES, 3, model, torch.device("cpu"))
    if len(batches) < 3:
        raise RequestError(
            f"data={config.data.name} gives fewer than {3 * SAMPLES} samples: the export is tried with these"
        )
    if not is_flat(batches[0]):
        raise RequestError(
            f"data={config.data.name} gives {described(batches[0])}: a graph has its inputs by name, so for an export "
            "let collate return a dict of tensors"
        )
    return ExportSource(config, model, batches, weights)


def built(config: Config) -> torch.nn.Module:
    """Builds the model with the weights that a run of the configuration would start from, in fp32 on the CPU."""
    add_working_folder()
    model = build_seeded(config).float()
    _check_statistics(model)
    return model


def _check_statistics(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        is_counting = isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.track_running_stats
        if is_counting and module.momentum is None:
            raise RequestError(
                f"{name}: a BatchNorm with momentum=None averages over all steps, which ONNX's BatchNormalization "
                "cannot: give it a momentum"
            )


def _load(model: torch.nn.Module, request: Request) -> str:
    if request.from_weights is not None:
        load_weights(model, request.from_weights, "from_weights")
        return f"{request.from_weights}"
    if request.from_run is not None:
        return _load_run(model, request.config, request.from_run, request.checkpoint)
    if request.config.model.weights is not None:
        load_weights(model, Path(request.config.model.weights))
        return request.config.model.weights
    return f"new weights, seed {request.config.seed}"


def _load_run(model: torch.nn.Module, config: Config, run_dir: Path, named: Path | None) -> str:
    """Loads the named checkpoint of a run, else the latest weights that the run folder has; says which they are."""
    checkpoint = named or _latest_checkpoint(run_dir)
    if checkpoint is None:
        return _load_final(model, run_dir)
    if wrong := manifest.problems(checkpoint):
        raise RequestError(f"{checkpoint} is damaged: {wrong[0]}")
    model.load_state_dict(weights_in(checkpoint, config, model), strict=True)
    return f"{checkpoint}, after step {store.step_of(checkpoint)}"


def _load_final(model: torch.nn.Module, run_dir: Path) -> str:
    final = Run(run_dir).weights
    if not final.is_dir():
        raise RequestError(f"{run_dir}: there is neither a complete checkpoint nor {final.name}/ in it")
    load_weights(model, final, "from_run")
    return f"{final}, at the run's end"


def _latest_checkpoint(run_dir: Path) -> Path | None:
    """Returns the newest complete checkpoint; None if there is none, or if the run's final weights are later."""
    found = store.newest(Run(run_dir).checkpoints)
    for line in found.skipped:
        print(f"warning: {line}", file=sys.stderr)
    if found.path is None or _is_before_final(found.path, run_dir):
        return None
    return found.path


def _is_before_final(checkpoint: Path, run_dir: Path) -> bool:
    """Whether the run has written final weights of a later step than a checkpoint."""
    run = Run(run_dir)
    if not run.weights.is_dir() or run.weights.stat().st_mtime_ns <= (checkpoint / manifest.NAME).stat().st_mtime_ns:
        return False
    # After the last step the two are the same, and the checkpoint also knows its step.
    return store.step_of(checkpoint) != load_config(run.config_file).train.steps
