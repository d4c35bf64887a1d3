"""Rules between the keys of ``launcher=local``."""

from __future__ import annotations

import re

from ortlaunch.base.errors import RequestError
from ortlaunch.base.text import counted
from ortlaunch.config.devices import resolve_device, visible_gpus
from ortlaunch.config.schema import Device, LocalConfig, RunConfig
from ortlaunch.launch.launcher import Rule


def _gpus(config: RunConfig) -> None:
    wanted = config.launcher.workers_per_node
    if resolve_device(config.device) is not Device.cuda:
        return
    gpus = visible_gpus()
    if gpus == 0:
        raise RequestError("device=cuda and this machine shows no GPU: choose device=cpu, or look at nvidia-smi")
    if wanted is not None and wanted > gpus:
        raise RequestError(
            f"launcher.workers_per_node={wanted} is more than {counted(gpus, 'visible GPU')} here: "
            "lower it, or look at CUDA_VISIBLE_DEVICES"
        )


def _machines(config: RunConfig) -> None:
    launcher = config.launcher
    assert isinstance(launcher, LocalConfig)
    if launcher.run is not None and not re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{6}", launcher.run):
        raise RequestError(
            f"launcher.run={launcher.run}: must have the form 20260101-120000-1a2b3c, as the first machine prints it"
        )
    if launcher.nodes == 1:
        if launcher.master_addr is not None or launcher.node_rank:
            raise RequestError("launcher.master_addr and launcher.node_rank need launcher.nodes=2 or more")
        return
    if launcher.master_addr is None:
        raise RequestError(
            f"launcher.nodes={launcher.nodes} needs launcher.master_addr, the first machine as the others reach it "
            "(launcher=slurm finds it by itself)"
        )
    if not 0 <= launcher.node_rank < launcher.nodes:
        raise RequestError(
            f"launcher.node_rank={launcher.node_rank}: must be at least 0 and below launcher.nodes={launcher.nodes}"
        )
    if launcher.run is None and launcher.node_rank and not launcher.dry_run:
        raise RequestError(
            "launcher.run is missing: start the first machine (launcher.node_rank=0); it prints the line for this one"
        )


LOCAL_RULES: tuple[Rule, ...] = (_machines,)
LOCAL_START_RULES: tuple[Rule, ...] = (_gpus,)
