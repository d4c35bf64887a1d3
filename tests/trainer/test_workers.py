"""The workers' collectives and their time limits."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch.distributed as dist

from ortlaunch.estimate.pretend import join_nobody

WORKER = """
import os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from ortlaunch.trainer.workers import leave_limits_to_watch

rank, unlimited, path = int(sys.argv[1]), sys.argv[2] == "True", sys.argv[3]
limit = timedelta(seconds=3)
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2, timeout=limit)
if unlimited:
    leave_limits_to_watch()
dist.barrier()
time.sleep(5 * rank)
try:
    dist.all_reduce(torch.ones(1))
    print("done", flush=True)
except RuntimeError as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("unlimited", [False, True])
def test_a_collective_on_the_cpu_waits_for_a_worker_that_was_stopped(tmp_path, monkeypatch, unlimited):
    """Without `leave_limits_to_watch` gloo ends it, whether the others could run meanwhile or not."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(unlimited), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [worker.communicate(timeout=200)[0] for worker in workers]
    assert said[0].startswith("done" if unlimited else "[") and ("Timed out" in said[0]) is not unlimited, said


def test_gathering_writes_no_warning_of_torch_into_every_runs_log():
    workers = join_nobody(2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert workers.gather([1.0, 2.0]).shape == (2, 2)
    finally:
        dist.destroy_process_group()
