"""`ortlaunch export onnx`: the forward graph in train mode."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from onnx import ModelProto
from safetensors.torch import save_file

import ortlaunch
from ortlaunch.base.errors import RequestError
from ortlaunch.config.load import save_config
from ortlaunch.config.schema import Config, NoTrackingConfig
from ortlaunch.export import external_data, graph
from ortlaunch.export.exporting import export_training
from ortlaunch.export.folder import written
from ortlaunch.export.forward import LABELS, LOSS, Forward, find_forward, untouched
from ortlaunch.export.names import Names, settle
from ortlaunch.export.proofs import Proofs, prove_training
from ortlaunch.export.record import CONFIG, REST, ExportRecord
from ortlaunch.export.request import Request
from ortlaunch.export.source import ExportSource, open_source
from ortlaunch.models.task import make_task

MODEL = "model.onnx"


@dataclass(frozen=True)
class Exported:
    """An exported graph, and what is known about it."""

    source: ExportSource
    forward: Forward
    graph: ModelProto
    folder: Path
    """The folder of the external data, if any."""
    names: Names
    proofs: Proofs


def export_onnx(request: Request) -> ExportRecord:
    """Writes the forward graph.

    Raises:
        RequestError: the export fails, or its outputs differ from the model's.
    """
    if request.loss not in (None, "own"):
        raise RequestError(f"loss={request.loss}: ortlaunch export onnx adds no loss; loss=own exports the model's own")
    with written(request.out, force=request.has("force")) as folder:
        source = open_source(request)
        exported = export(
            source, folder / MODEL, own_loss=_wants_loss(request, source), external=request.has("external-data")
        )
        record = record_of("onnx", MODEL, exported, request)
        leave(record, exported, folder)
    return record


def _wants_loss(request: Request, source: ExportSource) -> bool:
    if request.loss == "own":
        return True
    try:
        make_task(source.model, {name: one for name, one in source.batches[0].items() if name != LABELS})
    except RequestError:
        # The model cannot be called without labels. If labels do not help either, the export reports it.
        return LABELS in source.batches[0]
    return False


def export(source: ExportSource, path: Path, *, own_loss: bool, external: bool = False) -> Exported:
    """Exports the model in train mode and checks what the graph computes.

    Args:
        source: the model and batches.
        path: where the graph will be saved, in a folder of its own; large weights are written next to it.
        own_loss: whether labels are inputs and the model's own loss is an output.
        external: whether to store the weights as external data whatever their size.

    Raises:
        RequestError: the export fails, or its outputs differ from the model's.
    """
    model, batches = source.model, source.batches
    model.train()
    forward = find_forward(model, batches[0], with_labels=own_loss)
    if own_loss and LOSS not in forward.outputs:
        raise RequestError("loss=own: the model returns no loss of its own: choose cross_entropy, mse or bce")
    warned = export_training(model, forward, batches[0], path)
    exported = external_data.read_exported(path, external=external)
    graph.correct(exported)
    graph.check_operators(exported, for_training=False, what="the exported graph")
    names = settle(model, forward, batches[0], exported, path.parent)
    graph.complete_for_gradient(exported)
    proofs = prove_training(model, forward, batches, exported, names, warned, path.parent)
    return Exported(source, forward, exported, path.parent, names, proofs)


def record_of(kind: str, file: str, exported: Exported, request: Request) -> ExportRecord:
    """Returns the content of `export.json` for an export in train mode."""
    source, forward = exported.source, exported.forward
    with untouched(source.model), torch.no_grad():
        inputs, outputs = forward.ports(source.batches[0], forward(source.model, source.batches[0]))
    return ExportRecord(
        kind,
        file,
        inputs,
        outputs,
        "own" if LOSS in forward.outputs else None,
        ortlaunch.__version__,
        min(exported.graph.ir_version, graph.IR_VERSION),
        graph.opset(exported.graph),
        source.weights,
        None if request.from_run is None else str(request.from_run),
        aliases=exported.names.aliases,
        trainable=list(exported.names.parameters),
        findings=dataclasses.asdict(exported.proofs) | {"unused_parameters": list(exported.names.unused)},
    )


def leave(record: ExportRecord, exported: Exported, folder: Path) -> None:
    """Writes the graph, the configuration, the tensors that are not in the graph, and the record."""
    graph.save(exported.graph, folder / record.model)
    leave_facts(record, exported.source.config, rest_of(exported), folder)


def leave_facts(record: ExportRecord, config: Config, rest: dict[str, torch.Tensor], folder: Path) -> None:
    """Writes the files that describe the graph."""
    # The address of the tracking server does not belong on a device.
    save_config(dataclasses.replace(config, tracking=NoTrackingConfig()), folder / CONFIG)
    if rest:
        save_file(rest, folder / REST)
    record.save(folder)


def rest_of(exported: Exported) -> dict[str, torch.Tensor]:
    """Returns the tensors of the state dict that are not in the graph."""
    names = exported.names
    there = {*names.parameters, *names.buffers, *names.aliases}
    state = exported.source.model.state_dict()
    return {name: tensor.detach().contiguous() for name, tensor in state.items() if name not in there}
