"""What all workers find out together: by real collectives of two processes, and from figures."""

from __future__ import annotations

import os
from pathlib import Path

from ortlaunch.trainer.preflight import slow_hosts
from tests.support.two import in_two


def test_a_slow_node_is_named_with_its_slowest_worker():
    times = [("n1", 1.0), ("n1", 1.1), ("n2", 2.5), ("n2", 3.0), ("n3", 0.9), ("n3", 1.0), ("n4", 1.9), ("n4", 1.0)]
    assert slow_hosts(times) == ["n2 takes 3.0 times as long as the median"]
    assert slow_hosts([("n1", 1.0)]) == []
    assert slow_hosts([("n1", 1.0), ("n2", 2.1)]) == ["n2 takes 2.1 times as long as the median"]


def worker(rank: int, folder: Path, version: str | None) -> None:
    """One of two workers; `version` is what the second claims to run."""
    import torch
    import torch.distributed as dist

    import ortlaunch
    from ortlaunch.base.errors import TrainingError
    from ortlaunch.trainer.preflight import meet
    from ortlaunch.trainer.workers import Workers

    os.environ["SLURMD_NODENAME"] = f"n{rank}"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    if rank == 1 and version is not None:
        ortlaunch.__version__ = version
    try:
        found = meet(Workers(rank, 2, torch.device("cpu"), 1))
        text = f"{found.reduced_mib} {found.bandwidth_gb_per_second > 0}"
    except TrainingError as error:
        text = str(error)
    (folder / str(rank)).write_text(text)
    os._exit(0)


def both(folder: Path, version: str | None) -> list[str]:
    """What the two workers say."""
    in_two(worker, folder, version)
    return [(folder / str(rank)).read_text() for rank in range(2)]


def test_an_all_reduce_is_timed(tmp_path):
    assert both(tmp_path, None) == ["4 True", "4 True"]


def test_other_software_on_one_node_is_named(tmp_path):
    for text in both(tmp_path, "0.0.7"):
        assert "the nodes do not run the same software" in text
        assert "n1: ortlaunch 0.0.7" in text
