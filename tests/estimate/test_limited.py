"""Runs whose memory is limited near what was estimated: those with a tenth more end, those with a tenth less do not.

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
def likely(folder: Path) -> int:
    """The likely peak of the run's only worker in bytes."""
    result = ortlaunch(folder, "estimate", *RUN, "--quick", "--format=json")
    found: int = json.loads(result.stdout)["machine"]["peak_bytes"]
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


def test_with_a_tenth_more_than_estimated_a_run_ends(limited: Limited, likely: int) -> None:
    result, kills = limited(int(1.1 * likely))
    assert (result.returncode, kills) == (0, 0), result.stdout + result.stderr
    assert "does not fit" not in result.stdout + result.stderr


def test_with_a_tenth_less_a_run_is_killed(limited: Limited, likely: int) -> None:
    result, kills = limited(int(0.9 * likely))
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
