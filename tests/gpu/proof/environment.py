"""The machine and what is installed on it, and the tests of tests/gpu."""

from __future__ import annotations

import importlib.metadata
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from packaging.utils import canonicalize_name

from tests.gpu.needed import ROOT, needed, read_roots
from tests.gpu.proof.budget import OutOfTime
from tests.gpu.proof.proof import RUNS, Check, Failed, Proof
from tests.gpu.proof.report import Outcome, Row

SITE = ROOT / "gpu-site"
"""Where prove.sh installs the wheels of the bundle."""


def rows(proof: Proof) -> Iterator[Row]:
    """The packages' requirements, and doctor."""
    checks = [
        Check("requirements of ortlaunch and of the bundle's packages", "all met", _requirements),
        Check(
            "ortlaunch doctor",
            "no error beside onnxruntime's, whose training part needs Python 3.11",
            lambda: _doctor(proof),
        ),
    ]
    yield from proof.judge(checks, together=True)


def _requirements() -> str:
    brought: dict[str, str] = {}
    machine: dict[str, str | None] = {}
    for found in importlib.metadata.distributions():
        if not found.metadata["Name"]:
            continue  # What an installation that was cut off has left.
        name = canonicalize_name(found.metadata["Name"])
        # The first on the path is the one that is imported.
        if name not in brought and name not in machine:
            is_brought = Path(str(found.locate_file(""))) == SITE
            (brought if is_brought else machine)[name] = found.version
    result = needed(read_roots(), machine, brought, _requires)
    if result.conflicts:
        raise Failed(
            "; ".join(line.replace("constraints.txt does not pin", "is not installed") for line in result.conflicts)
        )
    return f"{len(result.wheels)} packages of the bundle, {len(machine)} of the machine"


def _requires(wanted: dict[str, str]) -> dict[str, list[str]]:
    return {name: importlib.metadata.requires(name) or [] for name in wanted}


def _doctor(proof: Proof) -> str:
    ended = proof.command(["-m", "ortlaunch", "doctor", "--json"], proof.new_folder(), most=60)
    try:
        lines = json.loads(ended.output[ended.output.index("{") :])["lines"]
    except ValueError:
        raise Failed(ended.tail) from None
    levels = [line["level"] for line in lines]
    errors = [line for line in lines if line["level"] == "error"]
    text = "; ".join(f"{line['name']}: {line['text']}" for line in errors)
    if any(line["name"] != "onnxruntime" for line in errors):
        raise Failed(text)
    return f"{levels.count('ok')} lines ok, {levels.count('warning')} warnings{text and '; error: '}{text}"


def test_rows(proof: Proof) -> Iterator[Row]:
    """A row for each test of tests/gpu, which look at the runs of the sections before where they need the same."""
    results = proof.folder / "tests.xml"
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={results}", f"--rootdir={ROOT}"]
    words += ["-c", str(ROOT / "pyproject.toml"), str(ROOT / "tests" / "gpu")]
    try:
        ended = proof.command(words, proof.new_folder(), {RUNS: str(proof.folder)}, most=400)
    except OutOfTime as error:
        yield Row("tests/gpu", "all pass", str(error), Outcome.skipped)
        return
    if not results.is_file():
        raise Failed(ended.tail)
    yield from _read(results)


def _read(results: Path) -> Iterator[Row]:
    for case in ElementTree.parse(results).iter("testcase"):
        outcome, seen = Outcome.ok, f"passed in {float(case.get('time', '0')):.0f} s"
        for kind, found in (("failure", Outcome.failed), ("error", Outcome.failed), ("skipped", Outcome.not_possible)):
            if (problem := case.find(kind)) is not None:
                outcome, seen = found, problem.get("message") or kind
        yield Row(case.get("name", "?"), "passes", seen, outcome)
