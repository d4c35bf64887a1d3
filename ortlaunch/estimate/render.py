"""Prints an estimate as text."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ortlaunch.base.text import counted, size
from ortlaunch.estimate.band import MIB

_STYLE = {"fits": "bold green", "tight": "bold yellow", "does not fit": "bold red", "unknown": "bold"}
_PARTS = {
    "base_bytes": "process without tensors",
    "parameters_bytes": "parameters",
    "gradients_bytes": "gradients",
    "optimizer_state_bytes": "optimizer state",
    "trainer_buffers_bytes": "buffers of the trainer (communication buckets)",
    "activations_bytes": "activations kept for the backward",
    "allocator_bytes": "likely holes in the allocator's heap",
}
_PARTS_ON_GPU = {
    "base_bytes": "CUDA, NCCL and libraries",
    "allocator_bytes": "reserved at the peak beyond what is allocated",
}


def render(report: dict[str, Any], console: Console) -> None:
    """Prints a report that `ortlaunch.estimate.report` made."""
    first = report["workers"][0]
    on_gpu = report["device"] == "cuda"
    workers = report["world_size"]
    console.out(
        f"{report['model']}, backend={report['backend']}, trainer={report['trainer']}, {report['precision']}, "
        f"micro-batch {report['batch_size']}, {counted(workers, 'worker')}; by {report['method']}",
        highlight=False,
    )
    if report["note"]:
        console.out(f"note: {report['note']}", highlight=False)
    # Of another backend only the peaks of the phases are known.
    where = " on its GPU" if on_gpu else ""
    title = f"a worker holds{where}{'' if report['backend'] == 'eager' else ' in eager PyTorch'}"
    if first["parts"]:
        console.print(_parts(first, title, _PARTS | (_PARTS_ON_GPU if on_gpu else {})))
    console.print(_phases(first))
    console.out("\n".join(_conclusions(report)), highlight=False)
    console.print(Text(report["verdict"], _STYLE[report["verdict"]]))


def _parts(worker: dict[str, Any], title: str, names: dict[str, str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(title)
    table.add_column("", justify="right")
    for key, text in names.items():
        count = worker["parts"][key]
        # Of a small model's parameters 0 MiB would look as if they had been overlooked.
        table.add_row(text, "under 1 MiB" if 0 < count < MIB else size(count))
    return table


def _phases(worker: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("peak of the first worker")
    for name in ("low", "likely", "high"):
        table.add_column(name, justify="right")
    for name, band in worker["phases"].items():
        table.add_row(name, *(size(band[key]) for key in ("low_bytes", "peak_bytes", "high_bytes")))
    return table


def _conclusions(report: dict[str, Any]) -> list[str]:
    machine = report["machine"]
    limit = machine["limit_bytes"]
    workers = counted(len(report["workers"]), "worker")
    of = "a GPU with its worker" if report["device"] == "cuda" else f"a machine with its {workers}"
    lines = [
        f"{of}: {size(machine['low_bytes'])} to "
        f"{size(machine['high_bytes'])}, likely {size(machine['peak_bytes'])}; "
        + (f"limit {size(limit)} ({machine['limit_source']})" if limit is not None else machine["limit_source"])
    ]
    if compilers := machine["compilers_bytes"]:
        lines.append(f"{size(compilers)} of it for torch.compile's compilers in the first step, if no kernels are kept")
    if loaders := machine["loaders_bytes"]:
        lines.append(f"{size(loaders)} of it for the loader processes (data.workers)")
    if (saved := report["checkpointing_saves_bytes"]) is not None:
        # Holes in the heap may come to more than a small model's activations.
        what = f"{size(saved)} of a worker's step" if saved > 0 else "nothing"
        lines.append(f"train.activation_checkpointing=true would save {what}")
    if report["largest_batch_size"] is not None:
        why = ", all that a worker has of the data, or that is looked at" if report["largest_batch_is_all"] else ""
        lines.append(f"largest micro-batch that fits: {report['largest_batch_size'] or 'none'}{why}")
    if report["change"]:
        lines.append(f"to make it fit: {report['change']}")
    return lines
