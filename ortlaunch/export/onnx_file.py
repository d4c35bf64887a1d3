"""`ortlaunch export onnx`: the forward alone, as it trains."""

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
from ortlaunch.export import beside, graph
from ortlaunch.export.exporting import export_training
from ortlaunch.export.folder import written
from ortlaunch.export.forward import LABELS, LOSS, Forward, find_forward, untouched
from ortlaunch.export.names import Names, settle
from ortlaunch.export.proofs import Proofs, prove_training
from ortlaunch.export.record import CONFIG, REST, Record
from ortlaunch.export.request import Request
from ortlaunch.export.source import Source, open_source
from ortlaunch.models.task import make_task

MODEL = "model.onnx"


@dataclass(frozen=True)
class Exported:
    """A graph with what is known of it."""

    source: Source
    forward: Forward
    graph: ModelProto
    folder: Path
    """Where the weights lie that the graph has not itself."""
    names: Names
    proofs: Proofs


def export_onnx(request: Request) -> Record:
    """Writes the forward graph.

    Raises:
        RequestError: it cannot be exported, or does not do what the model does.
    """
    if request.loss not in (None, "own"):
        raise RequestError(
            f"loss={request.loss}: ortlaunch export onnx adds no loss; loss=own has the model's own in it"
        )
    with written(request.out, force=request.has("force")) as folder:
        source = open_source(request)
        exported = export(
            source, folder / MODEL, own_loss=_wants_loss(request, source), external=request.has("external-data")
        )
        record = record_of("onnx", MODEL, exported, request)
        leave(record, exported, folder)
    return record


def _wants_loss(request: Request, source: Source) -> bool:
    if request.loss == "own":
        return True
    try:
        make_task(source.model, {name: one for name, one in source.batches[0].items() if name != LABELS})
    except RequestError:
        # It cannot be called without labels; where labels do not help either, the export says so.
        return LABELS in source.batches[0]
    return False


def export(source: Source, path: Path, *, own_loss: bool, external: bool = False) -> Exported:
    """Exports the model in train mode and proves what the graph does.

    Args:
        source: the model and batches.
        path: where the graph is going to be saved, in a folder of its own; large weights are left beside it.
        own_loss: whether labels go in and the model's loss comes out.
        external: whether weights lie beside the graph whatever their size.

    Raises:
        RequestError: it cannot be exported, or does not do what the model does.
    """
    model, batches = source.model, source.batches
    model.train()
    forward = find_forward(model, batches[0], with_labels=own_loss)
    if own_loss and LOSS not in forward.outputs:
        raise RequestError("loss=own: the model returns no loss of its own: choose cross_entropy, mse or bce")
    warned = export_training(model, forward, batches[0], path)
    exported = beside.take(path, external=external)
    graph.check_operators(exported, for_training=False, what="the exported graph")
    names = settle(model, forward, batches[0], exported, path.parent)
    graph.complete_for_gradient(exported)
    proofs = prove_training(model, forward, batches, exported, names, warned, path.parent)
    return Exported(source, forward, exported, path.parent, names, proofs)


def record_of(kind: str, file: str, exported: Exported, request: Request) -> Record:
    """What `export.json` says of an export in train mode."""
    source, forward = exported.source, exported.forward
    with untouched(source.model), torch.no_grad():
        inputs, outputs = forward.ports(source.batches[0], forward(source.model, source.batches[0]))
    return Record(
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


def leave(record: Record, exported: Exported, folder: Path) -> None:
    """Writes the graph, the configuration, what the graph has not, and the record."""
    graph.save(exported.graph, folder / record.model)
    leave_facts(record, exported.source.config, rest_of(exported), folder)


def leave_facts(record: Record, config: Config, rest: dict[str, torch.Tensor], folder: Path) -> None:
    """Writes what belongs to the graph."""
    # Where runs are recorded is nobody's business on a device.
    save_config(dataclasses.replace(config, tracking=NoTrackingConfig()), folder / CONFIG)
    if rest:
        save_file(rest, folder / REST)
    record.save(folder)


def rest_of(exported: Exported) -> dict[str, torch.Tensor]:
    """Tensors of the state dict that the graph has not."""
    names = exported.names
    there = {*names.parameters, *names.buffers, *names.aliases}
    state = exported.source.model.state_dict()
    return {name: tensor.detach().contiguous() for name, tensor in state.items() if name not in there}
