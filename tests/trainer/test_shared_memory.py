"""Exchange through the memory of one machine, between real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ortlaunch
from ortlaunch.trainer import shared_memory
from ortlaunch.trainer.shared_memory import MOST_WORKERS
from ortlaunch.trainer.workers import Workers

SECONDS = 200
SCRIPT = Path(__file__).with_name("shared_memory_worker.py")


def outputs(folder: Path, count: int) -> list[list[str]]:
    """What each of so many workers wrote, by lines."""
    shared = os.environ | {
        "PYTHONPATH": str(Path(ortlaunch.__file__).parents[1]),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    workers = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder / "store")],
            env=shared | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        said = [worker.communicate(timeout=SECONDS) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0] * count, [errors[-2000:] for _, errors in said]
    assert "no memory for files" in said[0][1]
    return [out.splitlines() for out, _ in said]


@pytest.mark.parametrize("count", [2, 3])
def test_sums_and_gatherings_are_those_of_gloo(tmp_path: Path, count: int) -> None:
    said = outputs(tmp_path, count)
    assert all(lines[:2] == ["exchanged", "refused"] for lines in said)
    assert all("the workers' models differ" in lines[2] for lines in said)
    assert "worker 1 exchanges 44 bytes (turn 0) where worker 0 expects 40 (turn 0)" in said[0][2]
    last = count - 1
    assert all(f"worker {last} has ended" in lines[3] for lines in said[:last])


@pytest.mark.parametrize(
    ("world_size", "local", "device"),
    [
        (1, "1", "cpu"),
        (4, "2", "cpu"),
        (2, "2", "cuda"),
        (MOST_WORKERS + 1, str(MOST_WORKERS + 1), "cpu"),
        (2, None, "cpu"),
    ],
)
def test_other_workers_exchange_by_their_process_group(
    monkeypatch: pytest.MonkeyPatch, world_size: int, local: str | None, device: str
) -> None:
    if local is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert shared_memory.connect(Workers(0, world_size, torch.device(device), 1)) is None
