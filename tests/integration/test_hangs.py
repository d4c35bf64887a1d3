"""A worker that stops answering, and one that needs too much memory."""

from __future__ import annotations

import os
import signal
import socket

import psutil
import pytest

from tests.support.stumbling import NET, WORDS
from tests.support.waiting import until

NETS = f"""{NET}
import time
import torch

class Sleeps(Net):
    def stumble(self):
        sleep_for_ever()

class Greedy(Net):
    def stumble(self):
        torch.empty(1 << 60)

def sleep_for_ever():
    time.sleep(1e6)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hangs")
    (folder / "nets.py").write_text(NETS)
    return folder


def test_a_worker_that_stands_still_is_named_with_the_stacks_of_all(start, folder, leftovers):
    running = start(folder, *WORDS, "model.target=nets:Sleeps", "launcher.timeout_seconds=4", "tracking=none")
    run_dir = running.wait_for_training()
    result = running.finish()
    assert result.returncode == 1, result.report
    assert f"rank 1 on {socket.gethostname()} failed" in result.stderr
    assert "no progress for 4 s (launcher.timeout_seconds)" in result.stderr
    stacks = {rank: (run_dir / "stacks" / f"rank-{rank}.txt").read_text() for rank in (0, 1)}
    assert "sleep_for_ever" in stacks[1]
    assert "torch/autograd" in stacks[0]
    assert "sleep_for_ever" not in stacks[0]
    assert result.status == "FAILED"
    until(lambda: leftovers(run_dir) == [])


@pytest.mark.nightly
def test_a_worker_that_is_frozen_is_named(start, folder, leftovers):
    """SIGSTOP: not even its threads can say anything."""
    words = ("model=mlp", "backend=eager", "train.steps=1000000", "train.log_every=1", "tracking=none")
    running = start(folder, *words, "launcher.timeout_seconds=4")
    run_dir = running.wait_for_training()
    frozen = next(
        process
        for process in psutil.process_iter(["cmdline"])
        if str(run_dir) in (process.info["cmdline"] or []) and process.environ().get("RANK") == "1"
    )
    os.kill(frozen.pid, signal.SIGSTOP)
    result = running.finish()
    assert result.returncode == 1, result.report
    assert f"rank 1 on {socket.gethostname()} failed" in result.stderr
    assert "stopped answering" in result.stderr
    assert (run_dir / "stacks" / "rank-0.txt").is_file()
    until(lambda: leftovers(run_dir) == [])


def test_a_lack_of_memory_ends_with_figures_and_advice(launch, folder):
    words = (*WORDS, "model.target=nets:Greedy", "train.batch_size=8", "tracking=none")
    result = launch(folder, *words)
    assert result.returncode == 1, result.report
    assert f"rank 1 on {socket.gethostname()} failed" in result.stderr
    assert "out of memory" in result.stderr
    assert "GiB resident" in result.stderr
    assert "train.batch_size=4 train.grad_accumulation=2" in result.stderr
    assert "train.activation_checkpointing=true" in result.stderr
    assert "trainer.zero_stage=1" in result.stderr
