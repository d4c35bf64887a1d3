"""Becomes the command of a run, if no other process has done so: ``python -P -m ortlaunch.serve.runner RECORD WORD…``.

The record is a file that exists once (`os.link` fails where it exists) and holds the identity of the process that made
it. That process keeps its number and its start time when it becomes the command. So of all processes that are ever
started for one attempt of a job, exactly one becomes the run, and everybody can tell whether it lives.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from ortlaunch.run.identity import Process

NOT_FIRST = 75
"""The exit code of a process that found the record."""


def main() -> None:
    """Takes the record, and becomes the command."""
    record, words = Path(sys.argv[1]), sys.argv[2:]
    if not take(record):
        sys.exit(NOT_FIRST)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "ortlaunch", *words])


def take(record: Path) -> bool:
    """Writes who this process is into the record; returns whether it is the first one."""
    own = record.with_name(f".{record.name}-{os.getpid()}")
    with own.open("w", encoding="utf-8") as file:
        json.dump(asdict(Process.this()), file)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(own, record)
    except FileExistsError:
        return False
    finally:
        own.unlink()
    return True


if __name__ == "__main__":
    main()
