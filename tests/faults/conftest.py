"""Counts the faults that were tried, and prints how many the runs survived."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.faults.trials import SHARDED, Base, Trial, end, make_base

TRIALS = int(os.environ.get("ORTLAUNCH_FAULT_TRIALS", "1"))
"""Of each kind of fault; `make test-faults` sets ten."""

ODD = "".join(map(chr, range(0x20, 0x7F))).replace("/", "") + "%20 ö"
"""The name of the folder that all runs are made in: every printable character, and something like a URI's."""

_TRIED: Counter[str] = Counter()
_SURVIVED: Counter[str] = Counter()


def pytest_generate_tests(metafunc):
    """Each test that asks for a `trial` gets `TRIALS` of them; the number is its seed."""
    if "trial" in metafunc.fixturenames:
        metafunc.parametrize("trial", range(TRIALS))


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Base:
    """The run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("faults") / ODD
    folder.mkdir()
    return make_base(folder)


@pytest.fixture
def start(base):
    """Starts a run that will be disturbed."""
    begun = []

    def begin(seed, *words):
        begun.append(Trial(base, seed, *words))
        return begun[-1]

    yield begin
    for one in begun:
        end(one)


@pytest.fixture(scope="session")
def sharded_base(tmp_path_factory) -> Base:
    """The run that nothing disturbs, with a state that lies in shards."""
    return make_base(tmp_path_factory.mktemp("sharded"), *SHARDED)


def pytest_runtest_logreport(report):
    """Counts by the test's name, where the reports of all processes arrive."""
    name, bracket, _ = report.nodeid.rpartition("::")[2].partition("[")
    if "tests/faults/" in report.nodeid and report.when == "call" and bracket and not report.skipped:
        _TRIED[name] += 1
        _SURVIVED[name] += report.passed


def pytest_terminal_summary(terminalreporter):
    """The count."""
    if not _TRIED:
        return
    terminalreporter.section("faults tried and survived")
    for name, tried in _TRIED.items():
        terminalreporter.write_line(
            f"{name.removeprefix('test_').replace('_', ' '):<60} {_SURVIVED[name]:>3} of {tried}"
        )
    terminalreporter.write_line(f"{'all':<60} {sum(_SURVIVED.values()):>3} of {sum(_TRIED.values())}")
