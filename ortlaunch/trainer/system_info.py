"""Facts about the machines and devices of a run, which the workers exchange once at the start."""

from __future__ import annotations

import json
import os
import platform
import socket
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ortlaunch.base.files import replace_text
from ortlaunch.config import devices
from ortlaunch.config.schema import Device
from ortlaunch.metrics.gpu import Gpu, find_gpu
from ortlaunch.metrics.nodes import Nodes, WorkerLocation
from ortlaunch.metrics.system import Sampler
from ortlaunch.run.journal import Journal
from ortlaunch.run.run import Run
from ortlaunch.trainer.workers import Workers, values_of_all

FILE = "machines.json"


class SystemInfo:
    """The machines of a run, and the sampler of this worker's machine and GPU."""

    def __init__(self, workers: Workers, group: dist.ProcessGroup, run_dir: Path) -> None:
        """Collects the facts of all workers; all workers call it.

        Args:
            workers: this worker's place.
            group: all workers, on the CPU.
            run_dir: the run folder.
        """
        gpu = _gpu(workers.device)
        texts = values_of_all(json.dumps(_own_facts(workers, gpu)), group)
        self.everyone: list[dict[str, Any]] = [json.loads(text) for text in texts]
        """The facts of each worker, by rank."""
        self.nodes = Nodes([WorkerLocation(one["node"], one["host"], one["gpu"]) for one in self.everyone])
        samples_machine = int(os.environ.get("LOCAL_RANK", "0")) == 0
        self.sampler = Sampler(_roots(run_dir) if samples_machine else None, gpu)

    def tags(self) -> dict[str, str]:
        """The tags of the run."""
        names = dict.fromkeys(one["device"] for one in self.everyone)
        cuda = torch.version.cuda
        tags = {
            "ortlaunch.device_name": ", ".join(names),
            "ortlaunch.hosts": ",".join(self.nodes.hosts),
            "ortlaunch.torch": torch.__version__,
        }
        return tags | ({"ortlaunch.cuda": cuda} if cuda is not None else {})

    def journal(self, journal: Journal, run_dir: Path, artifact_folder: str) -> None:
        """Journals the tags, and a file with all facts as an artifact."""
        path = run_dir / FILE
        record = {"torch": _torch_facts(), "hosts": self.nodes.hosts, "workers": self.everyone}
        replace_text(path, json.dumps(record, indent=2) + "\n")
        journal.tags(self.tags())
        journal.artifact(path, artifact_folder)


def _own_facts(workers: Workers, gpu: Gpu | None) -> dict[str, Any]:
    return {
        "rank": workers.rank,
        "node": int(os.environ.get("GROUP_RANK", "0")),
        "host": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "device": device_name(workers.device),
        "gpu": gpu.index if gpu is not None else None,
        "driver": gpu.driver if gpu is not None else None,
        "cores": len(os.sched_getaffinity(0)),
        "threads": workers.threads,
        "memory_gib": round(psutil.virtual_memory().total / 1024**3, 1),
        "kernel": platform.release(),
    }


def _torch_facts() -> dict[str, Any]:
    facts: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        facts |= {"cudnn": torch.backends.cudnn.version(), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        facts["architectures"] = torch.cuda.get_arch_list()
    return facts


def device_name(device: torch.device) -> str:
    """The product name of a worker's GPU, or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else devices.device_name(Device.cpu)


def _gpu(device: torch.device) -> Gpu | None:
    if device.type != "cuda":
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return find_gpu(str(uuid)) if uuid is not None else None


def _roots(run_dir: Path) -> list[int]:
    """Process ids of torchrun, and of the launcher if it runs on this machine: their descendants belong to the run."""
    roots = [os.getppid()]
    launcher = Run(run_dir).launcher()
    if launcher is not None and launcher.lives:
        roots.append(launcher.pid)
    return roots
