"""Files that other processes read while a run goes on are never seen half-written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ortlaunch.launch.slurm.launcher import SlurmLauncher
from ortlaunch.run.journal import Journal
from ortlaunch.run.sweep import SweepTask, join
from ortlaunch.trainer.system_info import FILE, SystemInfo
from ortlaunch.trainer.workers import single_worker
from tests.support.alone import alone


def joined(folder: Path, times: int) -> Path:
    (folder / "tasks").mkdir(exist_ok=True)
    run_dir = folder / f"run-{times}"
    run_dir.mkdir()
    join(run_dir, SweepTask(folder, 3))
    return folder / "tasks" / "3"


def described(folder: Path, times: int) -> Path:
    with alone(), Journal(folder / "journal.jsonl") as journal:
        assert dist.group.WORLD is not None
        facts = SystemInfo(single_worker(torch.device("cpu"), 1), dist.group.WORLD, folder)
        facts.everyone[0]["host"] = f"host-{times}"
        facts.journal(journal, folder, "run")
    return folder / FILE


def scripted(folder: Path, times: int) -> Path:
    script = SlurmLauncher().write_script(folder, f"#!/bin/sh\necho {times}\n")
    assert os.access(script, os.X_OK)
    return script


@pytest.mark.parametrize("write", [joined, described, scripted])
def test_a_reader_of_the_old_file_keeps_it(tmp_path: Path, write: Callable[[Path, int], Path]) -> None:
    path = write(tmp_path, 1)
    before = path.read_text()
    with path.open() as reader:
        assert write(tmp_path, 2).read_text() != before
        assert reader.read() == before
    assert not [one for one in path.parent.iterdir() if one.name.startswith(f".{path.name}")]
