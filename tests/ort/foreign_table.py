"""Checks families as ``ortlaunch check`` does and writes the second table of docs/ort-families.md.

``python -m tests.ort.foreign_table [NAME ...]``, with the torch of the Python that runs it. Each family is a process of
its own, which ends after `_SECONDS`. The table keeps the rows of the families that are not named.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from tests.ort.foreign import BY_NAME, FOREIGN, Foreign, keys

Outcome = tuple[dict[str, Any] | None, str]
"""The report of a check, or None and what it said instead."""

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "ort-families.md"
HEADING = "## Families of transformers through `ortlaunch check`"
_SECONDS = 110.0
_TITLES = ("Family", "Kind", "Model class", "What it has", "Verdict", "Largest error of a gradient", "Why not")


@dataclass(frozen=True)
class Row:
    """One family, as the table shows it."""

    family: str
    kind: str
    model: str
    has: str
    verdict: str
    """fit, refused, or failed: an error of the check itself."""
    error: str
    note: str


def read(path: Path) -> list[Row]:
    """The rows of a table written before; none where there is no such file."""
    if not path.is_file():
        return []
    below = path.read_text().partition(HEADING)[2]
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in below.splitlines()]
    return [Row(*cells) for cells in rows if len(cells) == len(fields(Row)) and cells[0] in BY_NAME]


def checked(families: Sequence[Foreign], at_once: int = 2) -> Iterator[tuple[Foreign, Outcome]]:
    """Checks families, each in a process of its own, and yields what came of each."""
    # They share a thread each, and what takes long to import.
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ortlaunch.check.process", "onnxruntime", "transformers", "tests.ort.foreign"])
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(at_once) as pool:
        waiting = {family.name: pool.submit(_in_a_process, context, family, Path(name)) for family in families}
        for family in families:
            yield family, waiting[family.name].result()


def _in_a_process(context: Any, family: Foreign, folder: Path) -> Outcome:
    path = folder / family.name
    process = context.Process(target=_check, args=(family.name, path))
    process.start()
    process.join(_SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
        return None, f"no verdict after {_SECONDS:.0f} s"
    if path.is_file():
        report: dict[str, Any] = json.loads(path.read_text())
        return report, ""
    lines = [line.strip() for line in path.with_suffix(".log").read_text(errors="replace").splitlines() if line.strip()]
    return None, lines[-1] if lines else f"exit code {process.exitcode}"


def _check(name: str, path: Path) -> None:
    """What ``ortlaunch check`` runs in its own process."""
    from ortlaunch.check.process import check
    from ortlaunch.check.report import to_json
    from ortlaunch.compose.hydra_tree import compose
    from ortlaunch.compose.prepare import prepared
    from ortlaunch.config.load import to_config

    log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    config = prepared(to_config(compose([*keys(BY_NAME[name]), "backend=ort"])))
    report = check(config, path.parent, 1, with_cost=False)
    path.write_text(json.dumps(to_json(report)))
    # Without clean-up, as the process of the command ends.
    os._exit(0)


def row_of(family: Foreign, outcome: Outcome) -> Row:
    """Says what the table tells of a family."""
    report, message = outcome
    if report is None:
        verdict, error, note = "failed", "", message
    else:
        gradients = (report["parity"] or {}).get("gradients")
        verdict = "fit" if report["fit"] else "refused"
        error = f"{gradients['largest_error']:.0e}" if report["fit"] else ""
        note = "" if report["fit"] else _reason(report["verdict"])
    return Row(family.name, family.kind, f"`{family.model}`", family.has, verdict, error, note.replace("|", "/"))


def _reason(line: str) -> str:
    reason = line.partition(" because ")[2].partition("; or ")[0] or line
    return re.sub(r"/\S*/site-packages/", "", reason)


def section(rows: list[Row], version: str) -> list[str]:
    """The lines of the page that tell of these families."""
    order = {family.name: index for index, family in enumerate(FOREIGN)}
    fit = sum(row.verdict == "fit" for row in rows)
    return [
        HEADING,
        "",
        f"{fit} of {len(rows)} are fit, on torch {version}: small models with random weights on the CPU, with the "
        "dropout of their configuration. Each was checked as `ortlaunch check` does, on fresh data, other "
        "batch sizes and other sequence lengths, and trained for three steps beside PyTorch. The error is the "
        "largest difference in a gradient's tensor over the largest value in it. Models of sounds, and of texts "
        "with images, get digits as their input. LayerDrop and masks that NumPy draws are off, because they are "
        "decisions of Python.",
        "",
        "Made by `python -m tests.ort.families_table`; as nightly in `tests/ort/test_foreign.py`.",
        "",
        _line(_TITLES),
        _line(("---",) * len(_TITLES)),
        *(_line(astuple(row)) for row in sorted(rows, key=lambda row: order[row.family])),
    ]


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def write(rows: list[Row], version: str) -> None:
    """Puts the section in place of the former one, at the end of the page."""
    above = TABLE.read_text().partition(HEADING)[0].rstrip()
    TABLE.write_text("\n".join([above, "", *section(rows, version)]) + "\n")


def main() -> None:
    """Checks the named families, or all."""
    import torch

    version = torch.__version__.partition("+")[0]
    for family, outcome in checked([BY_NAME[name] for name in sys.argv[1:]] or FOREIGN):
        row = row_of(family, outcome)
        print(_line(astuple(row)), flush=True)
        write([row, *(other for other in read(TABLE) if other.family != family.name)], version)


if __name__ == "__main__":
    main()
