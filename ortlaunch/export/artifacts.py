"""`ortlaunch export artifacts`: the forward graph and the files with which ONNX Runtime trains it on a device."""

from __future__ import annotations

import math
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from onnx import ModelProto

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import DeviceOptimizer, OptimizerConfig
from ortlaunch.export import graph, losses, statistics
from ortlaunch.export.folder import written
from ortlaunch.export.forward import LABELS, LOGITS, LOSS, shorter, untouched
from ortlaunch.export.onnx_file import MODEL, Exported, export, leave, record_of
from ortlaunch.export.record import ExportRecord
from ortlaunch.export.request import Request
from ortlaunch.export.shapes import note_shapes
from ortlaunch.export.source import open_source
from ortlaunch.export.trainers import ArtifactTrainer, TorchTrainer, training_batch
from ortlaunch.ort import artifacts
from ortlaunch.ort.artifacts import EVAL, NOMINAL, OPTIMIZER, TRAINING, Plan
from ortlaunch.ort.verify.compare import compare
from ortlaunch.ort.verify.nested import NamedTensors

_GRADIENT_TOLERANCE = 1e-3
"""Largest allowed error of a gradient over its largest value; the tested model families show 1e-6 to 1e-5."""


def export_artifacts(request: Request) -> ExportRecord:
    """Writes the forward graph and the training artifacts.

    Raises:
        RequestError: the model cannot be exported, or ONNX Runtime cannot train it in this way.
    """
    optimizer = request.config.optimizer
    if optimizer.groups:
        raise RequestError("optimizer.groups: on a device all weights are trained alike: leave them out")
    device_optimizer = optimizer.on_device()
    prefix = _prefix(request)
    with written(request.out, force=request.has("force")) as folder:
        source = open_source(request)
        source.model.train()
        with untouched(source.model):
            loss = losses.choose(request.loss, source.model, source.batches[0])
        exported = export(
            source, folder / f"{prefix}{MODEL}", own_loss=loss == "own", external=request.has("external-data")
        )
        with untouched(source.model), torch.no_grad():
            logits = exported.forward(source.model, source.batches[0]).get(LOGITS)
        losses.check_fits(loss, logits, source.batches[0][LABELS])
        trainable, frozen = _shares(exported, request)
        record = record_of("artifacts", prefix + MODEL, exported, request)
        record.loss, record.prefix = loss, prefix
        record.trainable, record.frozen = trainable, frozen
        record.optimizer = _facts(optimizer)
        record.statistics = _generate(
            exported, record, device_optimizer, folder, nominal=request.has("nominal-checkpoint")
        )
        _try(folder, record, exported, optimizer)
        leave(record, exported, folder)
    return record


def _prefix(request: Request) -> str:
    prefix = str(request.options.get("prefix", ""))
    if "/" in prefix or "\0" in prefix:
        raise RequestError(f"--prefix {prefix}: begins the names of files, so it must not contain '/'")
    return prefix


def _facts(cfg: OptimizerConfig) -> dict[str, float | str]:
    return {name: getattr(cfg, name) for name in ("name", *cfg.on_device().keys)}


def _shares(exported: Exported, request: Request) -> tuple[list[str], list[str]]:
    """Returns the names of the trained parameters and of the frozen ones; buffers count as frozen."""
    names = exported.names
    for key, globs in (("trainable", request.trainable), ("frozen", request.frozen)):
        for glob in globs:
            if not any(fnmatchcase(name, glob) for name in names.parameters):
                raise RequestError(
                    f"{key}={glob}: no parameter of the graph has such a name; there are "
                    f"{', '.join(names.parameters[:4])}{' and others' if len(names.parameters) > 4 else ''}"
                )
    parameters = dict(exported.source.model.named_parameters())
    trainable = [
        name
        for name in names.parameters
        if parameters[name].requires_grad
        and any(fnmatchcase(name, glob) for glob in request.trainable)
        and not any(fnmatchcase(name, glob) for glob in request.frozen)
    ]
    if not trainable:
        raise RequestError("trainable and frozen leave nothing to train")
    chosen = set(trainable)
    buffers = dict(exported.source.model.named_buffers())
    frozen = [name for name in names.parameters if name not in chosen]
    return trainable, frozen + [name for name in names.buffers if buffers[name].is_floating_point()]


def _generate(
    exported: Exported, record: ExportRecord, optimizer: DeviceOptimizer, folder: Path, *, nominal: bool
) -> dict[str, str]:
    """Writes the artifacts and corrects what ONNX Runtime 1.19.2 gets wrong with this version of onnx.

    Returns:
        Which output of a training step holds the new value of which BatchNorm statistic.
    """
    model = ModelProto()
    model.CopyFrom(exported.graph)
    note_shapes(model, exported.forward, exported.source.batches[0], exported.folder)
    moving = statistics.add_outputs(model)
    plan = Plan(
        record.trainable,
        record.frozen,
        None if record.loss == "own" else record.loss,
        LOSS if record.loss == "own" else LOGITS,
        list(moving),
        optimizer,
        record.prefix,
        nominal,
    )
    artifacts.generate(model, folder, plan)
    for name in (TRAINING, EVAL, OPTIMIZER):
        path = folder / f"{record.prefix}{name}"
        made = graph.load(path)
        if name == EVAL:
            statistics.forget_outputs(made, moving)
        if name == OPTIMIZER:
            artifacts.as_pytorch(made)
        graph.check_operators(made, for_training=True, what=path.name)
        graph.save_unchecked(made, path)
    return moving


def _try(folder: Path, record: ExportRecord, exported: Exported, optimizer: OptimizerConfig) -> None:
    """Loads the artifacts as a device does, compares their gradients with PyTorch's, and runs one training step.

    Raises:
        RequestError: ONNX Runtime cannot load the artifacts, or computes other gradients.
    """
    model, batches = exported.source.model, exported.source.batches
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    trials = [batches[0], shorter(shorter(batches[1], 0), 1)]
    with tempfile.TemporaryDirectory() as scratch:
        try:
            ort_trainer = ArtifactTrainer(folder, record, Path(scratch))
            torch_trainer = TorchTrainer(model, record, optimizer)
            for trial in trials:
                batch = training_batch(record, model, trial)
                _compare_gradients(record, ort_trainer.gradients(batch), torch_trainer.gradients(batch))
            batch = training_batch(record, model, batches[0])
            ort_trainer.step(batch)
            ort_trainer.evaluate(batch)
            if (folder / f"{record.prefix}{NOMINAL}").exists():
                artifacts.Checkpoint(folder / f"{record.prefix}{NOMINAL}")
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(f"ONNX Runtime does not take the artifacts that it has made: {error}") from error
        finally:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(before[name])


def _compare_gradients(record: ExportRecord, actual: NamedTensors, expected: NamedTensors) -> None:
    found = compare(actual, expected)
    worst = max((one.error if one.error is not None else math.inf for one in found.differing), default=0.0)
    record.findings["gradient_error"] = max(found.largest_error, worst, record.findings.get("gradient_error", 0.0))
    if worst > _GRADIENT_TOLERANCE:
        names = ", ".join(one.name for one in found.differing[:3])
        raise RequestError(
            f"ONNX Runtime's gradients of this model are not PyTorch's: {names} off by {worst:.1e} of its largest value"
        )
