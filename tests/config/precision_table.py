"""The tables of docs/precision.md, made of the rules: ``python -m tests.config.precision_table`` writes them."""

from __future__ import annotations

from pathlib import Path

from ortlaunch.config.precisions import BACKENDS, TRAINERS, Cell
from ortlaunch.config.schema import Device, Precision

PAGE = Path(__file__).parents[2] / "docs" / "precision.md"
BEGIN, END = "<!-- made of the rules: python -m tests.config.precision_table -->\n", "<!-- end -->\n"
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


def page_with(text: str, tables: str) -> str:
    """The page with these tables in place of those it has."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + tables + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text(), table()))
