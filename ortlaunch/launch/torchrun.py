"""torchrun: how many workers a machine has, the command that starts them, and the variables that they get."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ortlaunch.config.schema import Config, Device
from ortlaunch.config.trainers import trainer_of
from ortlaunch.run.run import Run

CPU_WORKERS = 2
"""Workers on a machine without GPU unless told otherwise: the fewest that make a run distributed."""


def workers_per_node(config: Config, device: Device, gpus: int, cores: int) -> int:
    """Workers on each machine: as many as are asked for, else one per GPU, or two on a machine without GPU.

    Args:
        config: the configuration.
        device: what the workers compute on.
        gpus: of each machine.
        cores: of each machine.
    """
    if trainer_of(config.trainer).has_one_worker:
        return 1
    if config.launcher.workers_per_node is not None:
        return config.launcher.workers_per_node
    return gpus if device is Device.cuda else min(CPU_WORKERS, cores)


def torchrun(run_dir: Path, nodes: int, workers: int, options: list[str]) -> list[str]:
    """The command for one machine's workers.

    Args:
        run_dir: the run folder.
        nodes: machines of the run.
        workers: on each of them.
        options: further options of torchrun: how the machines find each other, and what becomes of a crash.
    """
    return [
        sys.executable,
        *("-m", "torch.distributed.run"),
        f"--nnodes={nodes}",
        f"--nproc-per-node={workers}",
        "--rdzv-backend=c10d",
        *options,
        *("-m", "ortlaunch.worker"),
        str(run_dir),
    ]


def worker_environment(
    config: Config, device: Device, threads: int, run_dir: Path, interface: str | None
) -> dict[str, str]:
    """Variables that every worker has, on top of those of its surroundings.

    Args:
        config: the configuration.
        device: what the workers compute on.
        threads: of each worker.
        run_dir: the run folder.
        interface: the network interface that they talk over; None leaves it to them.
    """
    variables = {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if config.backend.name != "compile":
        # DeepSpeed decorates a function of its own with torch.compile. Older torch then starts a process for each core
        # beside every worker, for whatever may be compiled; this way it does so once something is.
        variables["TORCH_WARM_POOL"] = os.environ.get("TORCH_WARM_POOL", "0")
    if interface is not None:
        # It looks for a network card by the host's own name, which often does not resolve.
        variables["GLOO_SOCKET_IFNAME"] = interface
    if device is Device.cpu:
        # DeepSpeed looks for an accelerator of its own where nobody says which.
        variables |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    else:
        # NCCL's flight recorder keeps the last collectives of each worker and leaves them behind at a time-out. Each
        # under the name that older torch has for it, too.
        trace = str(Run(run_dir).stacks / "nccl-rank-")
        variables |= {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}
        variables |= {"TORCH_FR_DUMP_TEMP_FILE": trace, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": trace}
        variables["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
    return variables
