"""What a run will be, decided before anything starts: its folder, its workers, their command and environment."""

from __future__ import annotations

import re
import secrets
import shlex
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from ortlaunch.config.schema import Config, DeepSpeedConfig, Device
from ortlaunch.launch.devices import resolve_device, usable_cores, visible_gpus

CPU_WORKERS = 2
"""Workers on a machine without GPU unless told otherwise: the fewest that make a run distributed."""


@dataclass(frozen=True)
class LaunchPlan:
    """One run on this machine."""

    run_dir: Path
    run_id: str
    name: str
    workers: int
    threads: int
    """Threads of each worker: its share of the cores."""
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    """Variables set for the workers, on top of this process's own."""

    @property
    def log_dir(self) -> Path:
        """Folder of the ranks' log files."""
        return self.run_dir / "logs"

    @property
    def journal(self) -> Path:
        """The run's journal."""
        return self.run_dir / "journal.jsonl"

    def shell_line(self) -> str:
        """The command as it would be typed in a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.environment.items())]
        return " ".join([*variables, shlex.join(self.command)])


def make_plan(config: Config) -> LaunchPlan:
    """Plans a run of `config`, whose rules hold. Decides only; writes nothing."""
    run_id = secrets.token_hex(3)
    name = config.name or default_name(config)
    folder = f"{time.strftime('%Y%m%d-%H%M%S')}-{_folder_name(name)}-{run_id}"
    run_dir = (Path(config.run_root) / _folder_name(config.experiment) / folder).absolute()
    device = resolve_device(config.device)
    workers = _workers(config, device)
    threads = max(1, usable_cores() // workers)
    return LaunchPlan(
        run_dir=run_dir,
        run_id=run_id,
        name=name,
        workers=workers,
        threads=threads,
        command=_torchrun(workers, run_id, run_dir),
        environment=_environment(device, threads),
    )


def default_name(config: Config) -> str:
    """A name made of what distinguishes most runs: model, backend, trainer and ZeRO stage."""
    trainer = config.trainer.name
    if isinstance(config.trainer, DeepSpeedConfig):
        trainer += f"-z{config.trainer.zero_stage}"
    return f"{config.model.name}-{config.backend.name}-{trainer}"


def _workers(config: Config, device: Device) -> int:
    if config.trainer.name == "single":
        return 1
    if config.launcher.workers_per_node is not None:
        return config.launcher.workers_per_node
    if device is Device.cuda:
        return visible_gpus()
    return min(CPU_WORKERS, usable_cores())


def _torchrun(workers: int, run_id: str, run_dir: Path) -> list[str]:
    # Port 0 lets the rendezvous take a free one. The address is named because a host's own name often does not resolve.
    return [
        sys.executable,
        *("-m", "torch.distributed.run"),
        "--nnodes=1",
        f"--nproc-per-node={workers}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1",
        f"--rdzv-id={run_id}",
        *("-m", "ortlaunch.worker"),
        str(run_dir),
    ]


def _environment(device: Device, threads: int) -> dict[str, str]:
    variables = {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device is Device.cpu:
        # Both look for a network card and an accelerator of their own where nobody says which.
        variables |= {"GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    return variables


def _folder_name(name: str) -> str:
    return re.sub(r"[^\w.+=-]+", "_", name)
