"""Renders what an export prints at its end."""

from __future__ import annotations

from pathlib import Path

from ortlaunch.base.text import counted
from ortlaunch.export.record import ExportRecord, Port


def summary(out: Path, record: ExportRecord) -> str:
    """Returns one line each for the folder, its files, and the results of the checks."""
    lines = [f"{out}: {record.kind} of {record.weights}"]
    lines += [f"  {name:<28} {size:>12,} bytes" for name, size in record.files.items()]
    lines.append(f"  in   {', '.join(map(_port, record.inputs))}")
    lines.append(f"  out  {', '.join(map(_port, record.outputs))}")
    lines.append(
        f"  IR version {record.ir_version}, opset {record.opset}" + (f", loss {record.loss}" if record.loss else "")
    )
    return "\n".join([*lines, *(f"  {line}" for line in _findings(record))])


def _port(port: Port) -> str:
    return f"{port.name} {port.dtype}[{', '.join(map(str, port.shape))}]"


def _findings(record: ExportRecord) -> list[str]:
    found = record.findings
    lines = _training(record)
    if found.get("parameters"):
        lines.append(
            f"{counted(found['parameters'], 'parameter')} under their own names, none folded: other weights "
            "put in are used"
        )
    if found.get("unused_parameters"):
        lines.append(f"left out, as the forward does not use them: {', '.join(found['unused_parameters'])}")
    if found.get("dropout"):
        rates = sorted({round(rate, 6) for rate in found["dropout"]})
        lines.append(
            f"{counted(len(found['dropout']), 'dropout')} active (rate {', '.join(f'{rate:g}' for rate in rates)})"
        )
    if found.get("batch_norms"):
        lines.append(f"{counted(found['batch_norms'], 'BatchNorm')} on the batch's own statistics")
    if found.get("shapes"):
        shapes = ", ".join("x".join(map(str, shape)) for shape in found["shapes"])
        lines.append(f"equal to PyTorch on {shapes}: largest relative error {found['largest_error']:.1e}")
    if quantized := found.get("quantized"):
        lines.append(
            f"quantized: off by {quantized['largest_error']:.1%} of the largest output at most, the same choice in "
            f"{quantized['same_choice']:.1%}"
        )
    return lines


def _training(record: ExportRecord) -> list[str]:
    if record.kind != "artifacts":
        return []
    optimizer = ", ".join(f"{key} {value:g}" for key, value in record.optimizer.items() if key != "name")
    count = len(record.trainable)
    parameters = sum(1 for name in record.frozen if not any(name == kept for kept in record.statistics.values()))
    lines = [f"trains {counted(count, 'parameter')}, {parameters} frozen; {record.optimizer['name']} ({optimizer})"]
    lines.append(f"gradients equal PyTorch's: largest relative error {record.findings['gradient_error']:.1e}")
    if record.statistics:
        lines.append(f"{len(record.statistics)} running statistics of BatchNorm leave each step as outputs NAME.next")
    return lines
