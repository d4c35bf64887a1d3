"""``ortlaunch doctor``: runs all checks, even if some fail, and prints the results."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import io
from collections.abc import Callable, Iterator
from pathlib import Path

from ortlaunch.base.arguments import Parser
from ortlaunch.base.secrets import without_secrets
from ortlaunch.base.text import json_text, library_error, printable_lines
from ortlaunch.doctor import machine, service, stack, tracking
from ortlaunch.doctor.line import Level, Line

_DESCRIPTION = """\
Checks this environment and machine. Each line is ok, a warning or an error, with the command that fixes it.
Exit codes: 0 without an error, 1 with one."""


def main(arguments: list[str]) -> int:
    """Prints the report.

    Returns:
        0 without an error, 1 with one.
    """
    parser = Parser(
        prog="ortlaunch doctor", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the lines as JSON, for scripts")
    parser.add_argument("--uri", help="the MLflow store to look at (default: MLFLOW_TRACKING_URI, else that of runs)")
    parser.add_argument(
        "--database",
        type=Path,
        metavar="FILE",
        help="the database of the service to look at, as for ortlaunch serve (default: that of runs in this folder)",
    )
    options = parser.parse_args(arguments)
    lines = examine(options.uri, options.database)
    print(_json(lines) if options.json else _table(lines))
    return _code(lines)


def examine(uri: str | None = None, database: Path | None = None) -> list[Line]:
    """Runs all checks.

    Args:
        uri: the MLflow store; None takes the one of runs.
        database: the service's database; None takes the one of runs.
    """
    looks: dict[str, Callable[[], Iterator[Line]]] = {
        "python": stack.python,
        "torch": stack.torch,
        "driver": stack.driver,
        "onnxruntime": stack.packages,
        "cuda libraries": stack.cuda_libraries,
        "ortmodule": stack.ortmodule,
        "deepspeed": stack.deepspeed,
        "nccl": stack.nccl,
        "disk": machine.disk,
        "shared memory": machine.shared_memory,
        "slurm": machine.slurm,
        "service": functools.partial(service.service, database),
        "mlflow": functools.partial(tracking.mlflow, uri),
    }
    lines: list[Line] = []
    for name, look in looks.items():
        try:
            # Messages that libraries print while they are imported are not part of the report.
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                lines += look()
        # A broken installation may raise anything, and reporting it is the purpose of this command.
        except Exception as error:
            lines.append(Line(name, Level.error, library_error(error) or type(error).__name__))
    return lines


def _code(lines: list[Line]) -> int:
    return 1 if any(line.level is Level.error for line in lines) else 0


def _table(lines: list[Line]) -> str:
    width = max(len(line.name) for line in lines)
    rows = []
    for line in lines:
        rows.append(f"{line.level.value:<8} {line.name:<{width}}  {printable_lines(without_secrets(line.text))}")
        if line.fix is not None:
            rows.append(f"{'':<8} {'':<{width}}  fix: {line.fix}")
    return "\n".join(rows)


def _json(lines: list[Line]) -> str:
    plain = [dataclasses.asdict(line) | {"level": line.level.value} for line in lines]
    return json_text({"healthy": _code(lines) == 0, "lines": plain})
