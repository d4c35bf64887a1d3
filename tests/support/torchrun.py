"""A script of the tests on two real workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import ortlaunch

SECONDS = 280
"""Less than pytest waits for a test, so that it is known what was waited for and no worker is left."""


def run_probe(script: Path, out: Path, *arguments: str, workers: int = 2, restarts: int = 0) -> None:
    """Runs a script under torchrun, on the CPU and with a thread for each worker; fails the test if it fails.

    Args:
        script: beside the test.
        out: the file that it writes to, its first argument.
        arguments: its others.
        workers: how many run it.
        restarts: how often torchrun starts them again.
    """
    torchrun = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={workers}", "--nnodes=1"),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
            *("--log-dir=/dev/null", f"--max-restarts={restarts}"),
            *(str(script), str(out), *arguments),
        ],
        env=os.environ
        | {"PYTHONPATH": str(Path(ortlaunch.__file__).parents[1]), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        | {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""},
        cwd=out.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, errors = torchrun.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(torchrun.pid, signal.SIGKILL)
        torchrun.wait()
        raise
    assert torchrun.returncode == 0, errors[-4000:]


def leave() -> NoReturn:
    """Ends a worker of a probe as a run's worker ends: a normal exit can abort while gloo's threads hold tensors."""
    import torch.distributed as dist

    dist.barrier()
    os._exit(0)
