"""The proof that ortlaunch works on this machine's device: ``tests/gpu/prove.sh --device cuda|cpu``.

It runs real trainings and commands, each bounded in time, and writes a report in Markdown after every row. A section
that fails or runs out of time does not end the others. Exit codes: 0 no row failed, 1 a row failed, 2 the request is
wrong.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.needed import ROOT
from tests.gpu.proof import environment, memory, numbers, speed, survival, watching
from tests.gpu.proof.budget import Budget
from tests.gpu.proof.proof import Proof
from tests.gpu.proof.report import Outcome, Report, Row, Table

_CORES_PER_WORKER = 2
"""A short run is mostly start-up, which is one core's work, with a launcher beside it."""
_GENEROUS = 1.5
"""A section may take half more than its part, because most need less."""


@dataclass(frozen=True)
class Section:
    """One theme."""

    title: str
    weight: float
    """How much of the time that is left it may have, beside the weights of those that come after it."""
    rows: Callable[[Proof], Iterator[Row]]
    shares: bool = False
    """Whether sections beside it that share too may run at the same time; one that measures speed does not share."""


SECTIONS = {
    "environment": Section("Environment", 1, environment.rows, shares=True),
    "survival": Section("Checkpoints and kills", 4, survival.rows, shares=True),
    "numbers": Section("Trainers and precisions: the same numbers as on the CPU", 8, numbers.rows, shares=True),
    "memory": Section("Memory beside ortlaunch estimate", 4, memory.rows, shares=True),
    "watching": Section("Profile and host syncs", 3, watching.rows, shares=True),
    # It looks at runs of the sections before.
    "tests": Section("tests/gpu by pytest", 2, environment.test_rows),
    # It measures, so nothing runs beside it. It comes last because all the time that is left is of use to it.
    "speed": Section("Speed and memory", 12, speed.rows),
}
"""In the order in which they run. The weights go by the seconds that the sections took on an H200 and on two cores."""


def prove(sections: dict[str, Section], proof: Proof, report: Report, changed: Callable[[], None]) -> None:
    """Runs the sections one after the other, or those that share the machine together if several commands may run.

    Args:
        sections: what is proven, by name.
        proof: the machine and the time.
        report: gets a table for each section.
        changed: called after each row, by one thread at a time.
    """
    to_come = sum(section.weight for section in sections.values())
    for group in _groups(list(sections.values()), together=proof.jobs > 1):
        weight = sum(section.weight for section in group)
        part = min(1.0, _GENEROUS * weight / to_come)
        to_come -= weight
        tables = [Table(section.title) for section in group]
        report.tables += tables
        proof.is_shared = proof.jobs > 1 and all(section.shares for section in group)
        lock = threading.Lock()
        with proof.budget.section(part * proof.budget.left), ThreadPoolExecutor(len(group)) as pool:
            for filled in [pool.submit(_fill, *pair, proof, lock, changed) for pair in zip(tables, group, strict=True)]:
                filled.result()


def _groups(sections: Sequence[Section], *, together: bool) -> list[list[Section]]:
    """The sections that run at the same time, group after group."""
    groups: list[list[Section]] = []
    for section in sections:
        if together and groups and section.shares and groups[-1][0].shares:
            groups[-1].append(section)
        else:
            groups.append([section])
    return groups


def _fill(table: Table, section: Section, proof: Proof, lock: threading.Lock, changed: Callable[[], None]) -> None:
    """Adds a section's rows to its table as they come."""
    began = time.monotonic()

    def add(row: Row) -> None:
        with lock:
            table.rows.append(row)
            changed()

    try:
        for row in section.rows(proof):
            add(row)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        add(Row("the section itself", "comes to its end", problem, Outcome.failed))
    with lock:
        table.seconds = time.monotonic() - began
        changed()


def main() -> int:
    """Runs the proof; returns the exit code."""
    arguments = _arguments()
    # The installation of the wheels counts too.
    began = time.monotonic() - max(0.0, time.time() - float(os.environ.get("ORTLAUNCH_PROOF_BEGAN", time.time())))
    workers = arguments.workers or (_gpus() if arguments.device == "cuda" else 2)
    report = Report(f"ortlaunch on {arguments.device}", _facts(arguments.device, workers))

    def changed() -> None:
        report.facts["load of the last minute"] = f"{os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores"
        report.facts["took"] = f"{time.monotonic() - began:.0f} s of {60 * arguments.minutes:.0f} s"
        arguments.report.write_text(report.markdown())

    with tempfile.TemporaryDirectory(prefix="ortlaunch-proof-", ignore_cleanup_errors=True) as folder:
        proof = Proof(
            arguments.device,
            workers,
            arguments.jobs or max(1, len(os.sched_getaffinity(0)) // (_CORES_PER_WORKER * workers)),
            Path(folder),
            Budget(60 * arguments.minutes + began - time.monotonic()),
        )
        prove({name: SECTIONS[name] for name in arguments.only}, proof, report, changed)
    print(report.markdown())
    print(f"{arguments.report}: {report.summary}")
    return report.exit_code


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="prove.sh", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--minutes", type=float, default=10, help="time for everything (10)")
    parser.add_argument("--report", type=Path, default=Path("gpu-report.md"), help="the report's file (gpu-report.md)")
    parser.add_argument("--workers", type=int, help="workers of each run (all GPUs; 2 on the CPU)")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="these sections alone")
    parser.add_argument(
        "--jobs", type=int, help="runs at a time where no speed is measured (as many as have two cores for each worker)"
    )
    arguments = parser.parse_args()
    arguments.report = arguments.report.absolute()
    return arguments


def _gpus() -> int:
    import torch

    if not torch.cuda.is_available():
        print(f"prove.sh: torch {torch.__version__} sees no CUDA device; --device cpu tries the proof without one")
        sys.exit(2)
    return torch.cuda.device_count()


def _facts(device: str, workers: int) -> dict[str, str]:
    import torch
    import transformers

    commit = ROOT / "gpu-wheels" / "COMMIT"
    names = (
        [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if device == "cuda" else []
    )
    return {
        "commit": commit.read_text().strip() if commit.is_file() else _head(),
        "machine": ", ".join([*names, f"{len(os.sched_getaffinity(0))} cores", platform.platform(terse=True)]),
        "Python, torch, transformers": f"{platform.python_version()}, {torch.__version__}, {transformers.__version__}",
        "workers of each run": str(workers),
    }


def _head() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
