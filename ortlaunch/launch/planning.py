"""Plans a run before anything starts: here by torchrun, on a cluster as a job of SLURM."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ortlaunch.base.errors import RequestError
from ortlaunch.config.devices import resolve_device, usable_cores, visible_gpus
from ortlaunch.config.schema import Config, Device, LocalConfig, SlurmConfig
from ortlaunch.config.trainers import trainer_of
from ortlaunch.launch.local import machines
from ortlaunch.launch.plan import CPU_WORKERS, LaunchPlan, folder_name
from ortlaunch.launch.slurm.plan import plan_job
from ortlaunch.run.run import Run


def make_plan(config: Config) -> LaunchPlan:
    """Plans a run of `config`, whose rules hold. Decides only; writes nothing."""
    chosen = config.launcher.run if isinstance(config.launcher, LocalConfig) else None
    when, _, run_id = (chosen or machines.new_run()).rpartition("-")
    name = config.name or default_name(config)
    folder = f"{when}-{folder_name(name)}-{run_id}"
    run_dir = (Path(config.run_root) / folder_name(config.experiment) / folder).absolute()
    if run_dir.exists() and isinstance(config.launcher, LocalConfig) and config.launcher.node_rank == 0:
        raise RequestError(f"launcher.run={chosen}: {run_dir} is there already: go on with it by ortlaunch resume")
    return plan_in(config, run_dir, run_id, name)


def plan_in(config: Config, run_dir: Path, run_id: str, name: str, attempt: int = 0) -> LaunchPlan:
    """Plans a run of `config` in a given folder.

    Args:
        config: the configuration, whose rules hold.
        run_dir: the run folder.
        run_id: ortlaunch's own short id of the run.
        name: what the run is called.
        attempt: how often it was launched before.
    """
    if isinstance(config.launcher, SlurmConfig):
        return plan_job(config, run_dir, run_id, name, attempt)
    launcher = config.launcher
    assert isinstance(launcher, LocalConfig)
    device = resolve_device(config.device)
    workers = _workers(config, device)
    threads = max(1, usable_cores() // workers)
    return LaunchPlan(
        run_dir=run_dir,
        run_id=run_id,
        name=name,
        workers=workers,
        threads=threads,
        command=_torchrun(workers, machines.rendezvous(launcher, run_id), run_dir, launcher.max_restarts),
        environment=worker_environment(config, device, threads, run_dir, machines.network_interface(launcher)),
        attempt=attempt,
        nodes=launcher.nodes,
        node_rank=launcher.node_rank,
    )


def default_name(config: Config) -> str:
    """A name made of what distinguishes most runs: model, backend, trainer and ZeRO stage."""
    trainer = trainer_of(config.trainer).run_suffix(config.trainer)
    return f"{config.model.name}-{config.backend.name}-{trainer}"


def _workers(config: Config, device: Device) -> int:
    if trainer_of(config.trainer).has_one_worker:
        return 1
    if config.launcher.workers_per_node is not None:
        return config.launcher.workers_per_node
    if device is Device.cuda:
        return visible_gpus()
    return min(CPU_WORKERS, usable_cores())


def _torchrun(workers: int, rendezvous: list[str], run_dir: Path, max_restarts: int) -> list[str]:
    return [
        sys.executable,
        *("-m", "torch.distributed.run"),
        f"--nproc-per-node={workers}",
        "--rdzv-backend=c10d",
        *rendezvous,
        f"--max-restarts={max_restarts}",
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
