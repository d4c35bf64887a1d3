"""What srun starts on each node: ``python -m ortlaunch.launch.slurm.node preflight|train RUN_DIR``.

`preflight` says whether the node is fit; `train` becomes torchrun for the node's workers.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ortlaunch.config.devices import usable_cores
from ortlaunch.config.load import load_config
from ortlaunch.config.schema import Config, SlurmConfig
from ortlaunch.launch.planning import worker_environment
from ortlaunch.launch.slurm.fitness import attempt_token, report
from ortlaunch.launch.slurm.plan import workers_per_node
from ortlaunch.run.attempt import header
from ortlaunch.run.run import Run

_LEFT_TO_WORKERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def train(run_dir: Path) -> None:
    """Becomes torchrun; does not return."""
    config = load_config(Run(run_dir).config_file)
    _log_to(Run(run_dir).torchrun_log(os.environ["SLURM_NODEID"]))
    environment = {**os.environ, **environment_of(config, run_dir), "ORTLAUNCH_STARTED": repr(time.time())}
    command = torchrun(config, run_dir, os.environ)
    if "--signals-to-handle" in torchrun_source():
        # A signal to the job reaches every process on the node. The workers take it as a request to stop and write
        # their checkpoint; torchrun would end them after 30 seconds, whatever they are doing.
        for number in _LEFT_TO_WORKERS:
            signal.signal(number, signal.SIG_IGN)
    os.execvpe(command[0], command, environment)


def torchrun(config: Config, run_dir: Path, job: Mapping[str, str]) -> list[str]:
    """The command for one node's workers.

    Args:
        config: the run's configuration.
        run_dir: its folder.
        job: the variables of the SLURM task, and those that the batch script has set.
    """
    node = int(job["SLURM_NODEID"])
    source = torchrun_source()
    shield = ["--signals-to-handle=SIGINT,SIGHUP,SIGQUIT"] if "--signals-to-handle" in source else []
    if "--shutdown-timeout" in source:
        shield.append(f"--shutdown-timeout={config.launcher.grace_seconds}")
    return [
        sys.executable,
        *("-m", "torch.distributed.run"),
        f"--nnodes={config.launcher.nodes}",
        f"--nproc-per-node={workers_per_node(config)}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={job['ORTLAUNCH_HEAD']}:{job['ORTLAUNCH_PORT']}",
        f"--rdzv-id={attempt_token(job)}",
        # By number and not, as torchrun would, by a comparison of host names, which have many forms.
        f"--rdzv-conf=is_host={'true' if node == 0 else 'false'}",
        *_own_address(job.get("SLURMD_NODENAME", "")),
        "--max-restarts=0",
        *shield,
        *("-m", "ortlaunch.worker"),
        str(run_dir),
    ]


def environment_of(config: Config, run_dir: Path) -> dict[str, str]:
    """Variables of the node's workers; those that the user sets stay as they are."""
    cfg = config.launcher
    assert isinstance(cfg, SlurmConfig)
    threads = max(1, usable_cores() // workers_per_node(config))
    interface = "lo" if cfg.nodes == 1 else None
    return worker_environment(config, config.device, threads, run_dir, interface) | cfg.env


def torchrun_source() -> str:
    """torchrun's own text, which tells its options; ``torchrun --help`` would take seconds to import torch."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return ""
    try:
        return (Path(found.origin).parent / "distributed" / "run.py").read_text(encoding="utf-8")
    except OSError:
        return ""


def _own_address(name: str) -> list[str]:
    """The name under which the scheduler knows this node, if it resolves: the other nodes look for workers there."""
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return []
    return [f"--local-addr={name}"] if re.fullmatch(r"[\w.-]+", name) else []


def _log_to(path: Path) -> None:
    """Points this process's output to the node's own file, behind what earlier attempts wrote."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    print(header(), flush=True)


def main() -> None:
    """Runs the command line."""
    verb, run_dir = sys.argv[1], Path(sys.argv[2])
    if verb == "preflight":
        sys.exit(report(run_dir))
    train(run_dir)


if __name__ == "__main__":
    main()
