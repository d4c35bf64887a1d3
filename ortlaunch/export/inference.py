"""`ortlaunch export inference`: the model in eval mode for servers, with full and with 8-bit weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

import ortlaunch
from ortlaunch.base.errors import RequestError
from ortlaunch.export import external_data, graph
from ortlaunch.export.exporting import export_inference
from ortlaunch.export.folder import written
from ortlaunch.export.forward import Forward, find_forward
from ortlaunch.export.names import aliases_of
from ortlaunch.export.onnx_file import MODEL, leave_facts
from ortlaunch.export.proofs import largest_error, prove_inference
from ortlaunch.export.record import ExportRecord
from ortlaunch.export.request import Request
from ortlaunch.export.source import ExportSource, open_source
from ortlaunch.ort.runtime import Graph, quantize

QUANTIZED = "model.int8.onnx"
_QUANTIZED_ERROR = 0.1
"""Largest allowed error of a quantized output, over the largest value of the output."""


def export_for_inference(request: Request) -> ExportRecord:
    """Writes the model for inference, after onnx.checker and a comparison with PyTorch have passed.

    Raises:
        RequestError: the export fails, its outputs differ, or quantization changes them too much.
    """
    with written(request.out, force=request.has("force")) as folder:
        source = open_source(request)
        model, batches = source.model.eval(), source.batches
        forward = find_forward(model, batches[0], with_labels=False)
        warned = export_inference(model, forward, batches[0], folder / MODEL)
        exported = external_data.read_exported(folder / MODEL, external=request.has("external-data"))
        graph.correct(exported)
        graph.check_operators(exported, for_training=False, what="the exported graph")
        graph.save(exported, folder / MODEL)
        proofs = prove_inference(model, forward, batches, folder / MODEL, warned)
        with torch.no_grad():
            inputs, outputs = forward.ports(batches[0], forward(model, batches[0]))
        record = ExportRecord(
            "inference",
            MODEL,
            inputs,
            outputs,
            None,
            ortlaunch.__version__,
            min(exported.ir_version, graph.IR_VERSION),
            graph.opset(exported),
            source.weights,
            None if request.from_run is None else str(request.from_run),
            aliases=aliases_of(model),
            findings=dataclasses.asdict(proofs),
        )
        if request.has("quantize"):
            quantize(folder / MODEL, folder / QUANTIZED, external=external_data.used_by(exported))
            record.findings["quantized"] = _check_quantized(source, forward, folder / QUANTIZED)
        leave_facts(record, source.config, {}, folder)
    return record


def _check_quantized(source: ExportSource, forward: Forward, path: Path) -> dict[str, float]:
    """Measures the error of the quantized outputs, and how often the largest output is at the same position.

    Raises:
        RequestError: the error is above the limit.
    """
    external_data.lower_version(path)
    run = Graph(path)
    model = source.model
    worst, same, count = 0.0, 0, 0
    for batch in source.batches:
        with torch.no_grad():
            expected = forward(model, batch)
        outputs = run(forward.feed(batch))
        error, name, _ = largest_error(outputs, expected)
        worst = max(worst, error)
        for one, tensor in expected.items():
            if tensor.dim() > 1:
                same += int((outputs[one].argmax(-1) == tensor.argmax(-1)).sum())
                count += tensor[..., 0].numel()
        if not error <= _QUANTIZED_ERROR:
            raise RequestError(
                f"--quantize: with 8-bit weights {name} is off by {error:.1%} of its largest value, and the limit is "
                f"{_QUANTIZED_ERROR:.0%}: leave --quantize out"
            )
    return {"largest_error": worst, "same_choice": same / count if count else 1.0}
