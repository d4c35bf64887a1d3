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
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.needed import ROOT
from tests.gpu.proof import environment, numbers, speed, survival, watching
from tests.gpu.proof.budget import Budget
from tests.gpu.proof.proof import Proof
from tests.gpu.proof.report import Outcome, Report, Row, Table

_CORES_PER_JOB = 4
"""A short run is mostly start-up, on one core for each of its processes."""
_GENEROUS = 1.5
"""A section may take half more than its part, because most need less."""


@dataclass(frozen=True)
class Section:
    """One theme."""

    title: str
    weight: float
    """How much of the time that is left it may have, beside the weights of those that come after it."""
    rows: Callable[[Proof], Iterator[Row]]


SECTIONS = {
    "environment": Section("Environment", 1, environment.rows),
    "numbers": Section("Trainers and precisions: the same numbers as on the CPU", 5, numbers.rows),
    "speed": Section("Speed and memory", 4, speed.rows),
    "survival": Section("Checkpoints and kills", 2, survival.rows),
    "watching": Section("Profile and host syncs", 2, watching.rows),
    "tests": Section("tests/gpu by pytest", 3, environment.test_rows),
}


def prove(sections: dict[str, Section], proof: Proof, report: Report, changed: Callable[[], None]) -> None:
    """Runs the sections one after the other.

    Args:
        sections: what is proven, by name.
        proof: the machine and the time.
        report: gets a table for each section.
        changed: called after each row.
    """
    to_come = sum(section.weight for section in sections.values())
    for section in sections.values():
        part = min(1.0, _GENEROUS * section.weight / to_come)
        to_come -= section.weight
        table = Table(section.title)
        report.tables.append(table)
        began = time.monotonic()
        with proof.budget.section(part * proof.budget.left):
            try:
                for row in section.rows(proof):
                    table.rows.append(row)
                    changed()
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                table.rows.append(Row("the section itself", "comes to its end", problem, Outcome.failed))
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
            arguments.jobs,
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
    jobs = max(1, len(os.sched_getaffinity(0)) // _CORES_PER_JOB)
    parser.add_argument("--jobs", type=int, default=jobs, help=f"runs at a time where no speed is measured ({jobs})")
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
