"""Runs whose memory is limited to what was estimated: with the high figure they end, below the low one they do not.

Runs whose weights, gradients and optimizer state alone exceed the limit are warned of, or refused.

The limit is that of a control group around the whole command. The group counts torchrun and the launcher too, and of
the workers' libraries nothing that was in memory before; the run is large enough for these to be small.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cli import ortlaunch
from tests.support.control_groups import Group
from tests.support.environment import environment
from tests.support.needs import needs

pytestmark = pytest.mark.nightly
WORDS = ("model=gpt2", "train.batch_size=2", "train.steps=2", "trainer=single", "backend=eager", "device=cpu")
RUN = (*WORDS, "tracking=none", "train.save_weights=false")
STATE = 4 * 475 * 2**20
"""Bytes of GPT-2's weights, gradients and two moments: beside them there is no room for the processes."""
SECONDS = 400

Limited = Callable[..., tuple[subprocess.CompletedProcess[str], int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("limited")


@pytest.fixture(scope="module")
def machine(folder: Path) -> dict[str, int]:
    """The figures of the run's only worker in bytes."""
    result = ortlaunch(folder, "estimate", *RUN, "--quick", "--format=json")
    found: dict[str, int] = json.loads(result.stdout)["machine"]
    return found


@pytest.fixture
def limited(folder: Path) -> Iterator[Limited]:
    """Runs a command in a control group of so many bytes; returns it and how many processes the kernel has killed."""
    try:
        group = Group("memory")
    except OSError as error:
        needs(False, f"needs to make control groups: {error}")

    def run(size: int, *words: str) -> tuple[subprocess.CompletedProcess[str], int]:
        group.limit_memory(size)
        result = subprocess.run(
            [sys.executable, "-m", "ortlaunch", *RUN, *words],
            cwd=folder,
            env=environment(),
            preexec_fn=lambda: (group.folder / "cgroup.procs").write_text(str(os.getpid())),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        return result, group.kills()

    yield run
    group.close()


def test_a_run_that_fits_ends(limited: Limited, machine: dict[str, int]) -> None:
    result, kills = limited(machine["high_bytes"])
    assert (result.returncode, kills) == (0, 0), result.stdout + result.stderr
    assert "does not fit" not in result.stdout + result.stderr


def test_a_run_that_does_not_fit_is_killed(limited: Limited, machine: dict[str, int]) -> None:
    # The group does not count libraries that were in memory before.
    result, kills = limited(int(0.9 * machine["low_bytes"]))
    assert result.returncode == 1, result.stdout + result.stderr
    assert kills >= 1


def test_a_run_without_room_for_its_state_is_warned_of_and_killed(limited: Limited) -> None:
    result, kills = limited(STATE)
    assert result.stdout.count("warning: the run does not fit into memory") == 1, result.stdout + result.stderr
    assert result.returncode == 1
    assert kills >= 1


def test_a_run_without_room_for_its_state_is_refused(limited: Limited) -> None:
    result, kills = limited(STATE, "train.memory_check=error")
    assert (result.returncode, kills) == (2, 0), result.stdout + result.stderr
    assert result.stderr.startswith("ortlaunch: the run does not fit into memory")
