"""Workers on machines with other software: found by a real collective of two processes."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

import ortlaunch
from ortlaunch.base.errors import TrainingError
from ortlaunch.trainer.workers import check_software
from tests.support.two import in_two


def worker(rank: int, folder: Path) -> None:
    """One of two workers; the second claims to run another version in the second round."""
    os.environ["SLURMD_NODENAME"] = f"n{rank}"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    check_software()
    if rank == 1:
        ortlaunch.__version__ = "0.0.7"
    try:
        check_software()
    except TrainingError as error:
        (folder / str(rank)).write_text(str(error))
    os._exit(0)


def test_other_software_on_one_machine_is_named(tmp_path: Path) -> None:
    in_two(worker, tmp_path)
    for rank in range(2):
        text = (tmp_path / str(rank)).read_text()
        assert "the nodes do not run the same software" in text
        assert "n1: ortlaunch 0.0.7" in text
