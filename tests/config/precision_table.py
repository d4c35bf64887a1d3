"""The tables of docs/precision.md, made of the rules when the site is built: a hook of mkdocs (mkdocs.yml)."""

from __future__ import annotations

from typing import Any

from ortlaunch.config.precisions import BACKENDS, TRAINERS, Cell
from ortlaunch.config.schema import Device, Precision

PLACE = "<!-- the tables, made of the rules when the site is built -->\n"
TITLES = {Device.cpu: "On the CPU", Device.cuda: "On CUDA"}
ACCEPTED = {Device.cpu: "tested", Device.cuda: "accepted"}


def table() -> str:
    """Both tables and the reasons that they refer to, in Markdown."""
    reasons: list[str] = []
    parts = [
        part for device in (Device.cpu, Device.cuda) for part in (f"### {TITLES[device]}\n", _rows(device, reasons))
    ]
    notes = "\n".join(f"{number}. {reason}." for number, reason in enumerate(reasons, 1))
    return "\n".join([*parts, f"Refused, before anything starts, with these words:\n\n{notes}\n"])


def _rows(device: Device, reasons: list[str]) -> str:
    head = ["backend", "trainer", *(precision.value for precision in Precision)]
    lines = [head, ["---"] * len(head)]
    for backend in BACKENDS:
        for trainer in TRAINERS:
            cells = [Cell(backend, trainer, precision, device) for precision in Precision]
            lines.append([backend, trainer, *(_word(cell, reasons) for cell in cells)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _word(cell: Cell, reasons: list[str]) -> str:
    if cell.refusal is None:
        return ACCEPTED[cell.device]
    if cell.refusal not in reasons:
        reasons.append(cell.refusal)
    return f"refused ({reasons.index(cell.refusal) + 1})"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Puts the tables into the page that has a place for them."""
    return markdown.replace(PLACE, table()) if PLACE in markdown else markdown
