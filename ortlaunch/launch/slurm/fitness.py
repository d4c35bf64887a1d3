"""The preflight: each node checks itself for the run, within seconds and before anything heavy starts.

Each node writes one file, ``preflight/NUMBER-HOST.fit`` or ``.unfit``. If srun ends with 0, all nodes are fit and the
files are not read. Otherwise their names show which nodes did not answer, and only those of unfit nodes are opened.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from ortlaunch.base.files import replace_text
from ortlaunch.base.reading import load_json
from ortlaunch.config.load import load_run_config
from ortlaunch.config.schema import Device, RunConfig, SlurmConfig
from ortlaunch.launch.slurm.plan import workers_per_node
from ortlaunch.launch.slurm.programs import hostnames
from ortlaunch.launch.work import work_of
from ortlaunch.run.run import Run

FOLDER = "preflight"
NO_FOLDER = 3
_LEAST_FREE_GIB = 1.0
_PACKAGES = ("ortlaunch", "torch", "onnxruntime-training", "onnxruntime-training-cpu", "deepspeed")
_SHOWN = 16


def report(run_dir: Path) -> int:
    """Examines this node and writes its file.

    Returns:
        0 if it is fit, 1 if it is not, `NO_FOLDER` if it cannot use the run folder and so leaves no file.
    """
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    try:
        found = examine(run_dir)
        code = 1 if found else 0
        verdict = "unfit" if found else "fit"
        name = f"{int(os.environ['SLURM_NODEID']):06d}-{host}.{verdict}"
        Run(run_dir).preflight.mkdir(exist_ok=True)
        replace_text(Run(run_dir).preflight / name, "\n".join(found))
    except OSError as error:
        found, code = [f"the run folder {run_dir} cannot be used here: {error}"], NO_FOLDER
    for line in found:
        print(f"ortlaunch: {host}: {line}", file=sys.stderr, flush=True)
    for line in gpu_orphans():
        print(f"ortlaunch: {host}: warning: {line}", file=sys.stderr, flush=True)
    return code


def examine(run_dir: Path) -> list[str]:
    """Returns the reasons why this node is unfit, one line each.

    Raises:
        OSError: the run folder cannot be read here.
    """
    config = load_run_config(Run(run_dir).config_file)
    cfg = config.launcher
    assert isinstance(cfg, SlurmConfig)
    same_system = cfg.container.image is None and cfg.python is None
    return [
        *_other_folder(run_dir),
        *(_other_versions(Run(run_dir).environment_file) if same_system else []),
        # What the submitting machine could not see, if the nodes have a Python or a container of their own.
        *work_of(config).missing_here(),
        *_missing_gpus(config),
        *_full_disk(run_dir),
        *_unreachable(os.environ["ORTLAUNCH_HEAD"], cfg.nodes),
    ]


def only_silence(run_dir: Path, code: int) -> bool:
    """Returns whether the preflight failed only because nodes did not answer. Other nodes may then replace them.

    Args:
        run_dir: the run folder.
        code: what srun ended with, the largest code of all nodes.
    """
    return code != NO_FOLDER and not any(path.suffix == ".unfit" for path in Run(run_dir).preflight.glob("*"))


def problems(run_dir: Path) -> str:
    """Returns the findings of a failed preflight as text for the user."""
    folder = Run(run_dir).preflight
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    unfit = [name for name in names if name.endswith(".unfit")]
    lines = [
        f"{name[7:].removesuffix('.unfit')}: {line}"
        for name in unfit[:_SHOWN]
        for line in (folder / name).read_text().splitlines()
    ]
    missing = _nodes_without_file({int(name[:6]) for name in names if re.match(r"\d{6}-", name)})
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        lines.append(
            f"{', '.join(missing[:_SHOWN])}{more}: did not answer within launcher.preflight_seconds, or could not use "
            "the run folder (logs/slurm.log)"
        )
    return "\n".join(lines)


def attempt_token(job: Mapping[str, str] = os.environ) -> str:
    """Returns the unique token of this attempt: job id, restart count and attempt number."""
    variables = (("SLURM_JOB_ID", ""), ("SLURM_RESTART_COUNT", "0"), ("ORTLAUNCH_ATTEMPT", "0"))
    return "-".join(job.get(name, default) for name, default in variables)


def _nodes_without_file(answered: set[int]) -> list[str]:
    """Returns the names of the job's nodes that left no file."""
    node_list = os.environ.get("SLURM_JOB_NODELIST", "")
    return [name for number, name in enumerate(hostnames(node_list)) if number not in answered]


def _other_folder(run_dir: Path) -> list[str]:
    """Checks the token that the first node has written. A folder that this node does not share with it has no token."""
    token = Run(run_dir).preflight_token
    if token.is_file() and token.read_text() == attempt_token():
        return []
    remedy = "run_root must be on a file system that all nodes share"
    return [f"{run_dir} is not the run folder that the first node sees: {remedy}"]


def _other_versions(file: Path) -> list[str]:
    """Compares the versions here with those in the run's record."""
    try:
        recorded = dict(load_json(file)["packages"])
    except (ValueError, LookupError, TypeError):
        return [f"{file} cannot be read, so nobody knows the versions where the run was submitted: resume the run"]
    lines = []
    for package in _PACKAGES:
        try:
            here = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            here = "none"
        there = recorded.get(package, "none")
        if here != there:
            lines.append(f"{package} {here} is installed here, and {there} where the run was submitted")
    return lines


def _missing_gpus(config: RunConfig) -> list[str]:
    if config.device is not Device.cuda:
        return []
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"nvidia-smi does not answer: {error}"]
    seen = sum(line.startswith("GPU ") for line in done.stdout.splitlines())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        seen = min(seen, len([entry for entry in visible.split(",") if entry.strip()]))
    wanted = workers_per_node(config)
    return [] if seen >= wanted else [f"GPUs that are visible: {seen}, and {wanted} workers need one each"]


def _full_disk(run_dir: Path) -> list[str]:
    free = shutil.disk_usage(run_dir).free / 2**30
    return [] if free >= _LEAST_FREE_GIB else [f"only {free:.2f} GiB are free in {run_dir}"]


def _unreachable(head: str, nodes: int) -> list[str]:
    """Checks that this node finds the first node by its name, and that the other nodes can reach this one."""
    try:
        head_addresses = _addresses(head)
    except OSError as error:
        return [f"the name of the first node, {head}, does not resolve here: {error}"]
    is_one_machine = nodes == 1 or _are_loopback(head_addresses)
    return [] if is_one_machine else _loopback_name()


def _loopback_name() -> list[str]:
    """Checks this node's own name. gloo listens on its address, unless a network interface is named."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return []
    own = socket.gethostname()
    try:
        addresses = _addresses(own)
    except OSError:
        addresses = set()
    if not _are_loopback(addresses):
        return []
    return [
        f"its own name {own} is {', '.join(sorted(addresses)) or 'nothing'}, where other nodes cannot reach it: "
        "name the network card that joins the nodes, +launcher.env.GLOO_SOCKET_IFNAME=eth0 (ip -brief address)"
    ]


def _addresses(name: str) -> set[str]:
    return {str(entry[4][0]) for entry in socket.getaddrinfo(name, None, socket.AF_INET)}


def _are_loopback(addresses: set[str]) -> bool:
    """Returns whether only this machine can use these addresses, or there are none."""
    return all(address.startswith("127.") for address in addresses)


def gpu_orphans() -> list[str]:
    """Returns the user's processes that hold memory of this job's GPUs already, mostly those of an earlier run."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not visible or shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits", f"--id={visible}"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = []
    for pid, memory in re.findall(r"^(\d+), *(\d+)", done.stdout, re.MULTILINE):
        process = Path("/proc") / pid
        try:
            if process.stat().st_uid == os.getuid():
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                lines.append(f"process {pid} of yours holds {memory} MiB of this job's GPUs: {command[:120]}")
        except OSError:
            continue
    return lines
