"""Plans a SLURM job: its device, its workers and its request."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from pathlib import Path

from ortlaunch.config.schema import AnyRun, Device, GpuRequest, RunConfig, SlurmConfig
from ortlaunch.launch import torchrun
from ortlaunch.launch.plan import LaunchPlan
from ortlaunch.launch.slurm import programs
from ortlaunch.launch.slurm.request import JobRequest
from ortlaunch.launch.slurm.rules import names_gpus

_CARRIED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "HF_HOME", "XDG_CACHE_HOME")
"""Variables that are written into the script, so that they have the same values on the nodes as at submission. SLURM
passes on the other variables, so secrets are in no file."""

_GPUS_PER_NODE_SINCE = (19, 5)


def settled(config: AnyRun) -> AnyRun:
    """Returns the configuration with the device that the job asks for, which the login node need not have."""
    cfg = config.launcher
    assert isinstance(cfg, SlurmConfig)
    if config.device is not Device.auto:
        return config
    asks = bool(cfg.gpus_per_node) or names_gpus(cfg.gres)
    return dataclasses.replace(config, device=Device.cuda if asks else Device.cpu)


def workers_per_node(config: RunConfig) -> int:
    """Returns the number of workers on each node: the requested one, else one per GPU, or two without a GPU."""
    cfg = config.launcher
    assert isinstance(cfg, SlurmConfig)
    cores = cfg.cpus_per_node or torchrun.CPU_WORKERS
    return torchrun.workers_per_node(config, config.device, cfg.gpus_per_node or 1, cores)


def request_for(plan: LaunchPlan, tasks: int | None = None, folder: Path | None = None) -> JobRequest:
    """Returns the request for a planned job.

    Args:
        plan: the plan; for a sweep that of its first run.
        tasks: number of runs of a sweep, which must all ask for the same resources; None for one run.
        folder: the sweep's folder.
    """
    cfg = plan.config.launcher
    assert isinstance(cfg, SlurmConfig)
    carried = {name: os.environ[name] for name in _CARRIED if name in os.environ}
    return JobRequest(
        name=plan.name,
        run_dir=folder or plan.run_dir,
        working_dir=Path.cwd(),
        python=cfg.python or sys.executable,
        resources=cfg,
        gpu_request=cfg.gpu_request if cfg.gpu_request is not GpuRequest.auto else known_gpu_request(),
        environment=carried | cfg.env,
        tasks=tasks,
    )


def known_gpu_request() -> GpuRequest:
    """Returns how this cluster takes requests for GPUs, by the version of sinfo; without sinfo the newer way."""
    if not programs.is_here("sinfo"):
        return GpuRequest.gpus_per_node
    version = re.search(r"(\d+)\.(\d+)", programs.call("sinfo", "--version").text)
    takes_gpus_per_node = version is None or (int(version[1]), int(version[2])) >= _GPUS_PER_NODE_SINCE
    return GpuRequest.gpus_per_node if takes_gpus_per_node else GpuRequest.gres
