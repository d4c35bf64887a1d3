"""Writes docs/ort-families.md: ``python -m tests.ort.families_table``, with the torch of the Python that runs it.

Rows of other torch versions stay as they are, so that one environment after the other adds its own.
"""

from __future__ import annotations

import tempfile
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch

from tests.ort.families import FAMILIES, SHAPES, Family
from tests.ort.foreign_table import HEADING
from tests.ort.parity import PARTS, STEPS, TOLERANCE, Parity, measure

TABLE = Path(__file__).parents[2] / "docs" / "ort-families.md"
TESTED = ("2.13.0", "2.6.0")
"""The torch versions that the table tells of."""


@dataclass(frozen=True)
class Row:
    """One family under one torch, as the table shows it."""

    family: str
    model: str
    data: str
    torch: str
    exported: str
    parity: str
    worst: str
    note: str


_TITLES = ("Family", "Model class", "Data", "torch", "Exported", "Parity with eager", "Largest relative error", "Note")


def read(path: Path) -> list[Row]:
    """The rows of a table written before; none where there is no such file."""
    if not path.is_file():
        return []
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in path.read_text().splitlines()]
    known = {family.name for family in FAMILIES}
    return [Row(*cells) for cells in rows if len(cells) == len(fields(Row)) and cells[0] in known]


def row_of(family: Family, result: Parity) -> Row:
    """What the table says of a measurement."""
    wrong = [part for part in PARTS if part not in result.errors or result.worst(part)[1] > TOLERANCE[part]]
    right = [part for part in PARTS if part not in wrong]
    worst = max(right, key=lambda part: result.worst(part)[1], default=None)
    notes = [result.failure] if result.failure else [family.defects.get(part, part) for part in wrong]
    return Row(
        family=family.name,
        model=family.model,
        data=family.data,
        torch=torch.__version__.partition("+")[0],
        exported="yes" if result.exported else "no",
        parity="no: " + ", ".join(wrong) if wrong else "yes",
        worst=f"{result.worst(worst)[1]:.0e} ({worst})" if worst else "",
        note="; ".join(notes).replace("|", "/"),
    )


def page(rows: list[Row]) -> str:
    """The whole document."""
    order = {family.name: index for index, family in enumerate(FAMILIES)}
    ordered = sorted(rows, key=lambda row: (order[row.family], TESTED.index(row.torch)))
    lines = [
        "# Model families under ORT",
        "",
        "Made by `python -m tests.ort.families_table`; as `tests/ort/test_families.py` tests it.",
        "",
        "Small models of each class with random weights, dropout off, on the CPU in float32. The same weights are "
        f"trained for {STEPS} optimizer steps (AdamW; SGD with momentum for mlp and resnet) eager and under "
        "`backend=ort`, on real data whose batches have other sizes "
        f"and lengths at each step ({', '.join(f'{rows} x {length}' for rows, length in SHAPES)}). Compared are the "
        "loss of each step, every output and gradient of the first, and every parameter and buffer at the end, values "
        "and dtypes. An error is the largest difference in a tensor over the largest value in it; parity means at "
        "most " + ", ".join(f"{TOLERANCE[part]:.0e} for {part}" for part in PARTS) + ". The error shown is the "
        "largest of the parts that have parity.",
        "",
        _line(_TITLES),
        _line(("---",) * len(_TITLES)),
        *(_line(astuple(row)) for row in ordered),
    ]
    return "\n".join(lines) + "\n"


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measures every family and puts this torch's rows in place of its earlier ones."""
    version = torch.__version__.partition("+")[0]
    if version not in TESTED:
        raise SystemExit(f"torch {version} is none of the tested {', '.join(TESTED)}: add it to TESTED first")
    torch.set_num_threads(1)
    rows = [row for row in read(TABLE) if row.torch != version]
    with tempfile.TemporaryDirectory() as folder:
        for family in FAMILIES:
            rows.append(row_of(family, measure(family, Path(folder))))
            print(_line(astuple(rows[-1])), flush=True)
    TABLE.parent.mkdir(exist_ok=True)
    # The families of `foreign_table` come after these.
    _, heading, rest = TABLE.read_text().partition(HEADING) if TABLE.is_file() else ("", "", "")
    TABLE.write_text(page(rows) + (f"\n{heading}{rest}" if heading else ""))


if __name__ == "__main__":
    main()
