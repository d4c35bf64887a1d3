"""Runs on several machines that share a run folder and are started by hand: their commands and their rendezvous."""

from __future__ import annotations

import shlex
import socket
import time
from pathlib import Path
from typing import Any

import psutil

from ortlaunch.base.errors import RequestError
from ortlaunch.base.start import split_script
from ortlaunch.config.schema import AutoConfig, Config, LocalConfig
from ortlaunch.launch.plan import LaunchPlan
from ortlaunch.tracking import trackers

JOIN_SECONDS = 900
"""How long the machines wait for each other. A user types the command on each of them, which takes time."""

_OWN_KEYS = ("launcher.node_rank", "launcher.dry_run", "launcher.run", "run_root", "--multirun", "-m")
_MAY_DIFFER = ("launcher.node_rank", "launcher.run", "run_root", "tracking", "trackers", "name", "script.folder")


def lines_to_type(plan: LaunchPlan) -> list[str]:
    """Returns the command for each machine, in the order of their ranks; the run root is the same one on all."""
    resumes = plan.arguments[:1] == ("resume",)
    words, script = split_script(list(plan.arguments))
    kept = [word for word in words if word.partition("=")[0] not in _OWN_KEYS]
    place = [] if resumes else [f"run_root={Path(plan.config.run_root).absolute()}", f"launcher.run={plan.run}"]
    last = [] if script is None else ["--", *script]
    return [shlex.join(["ortlaunch", *kept, *place, f"launcher.node_rank={rank}", *last]) for rank in range(plan.nodes)]


def dry_run(plan: LaunchPlan) -> str:
    """Returns the commands of all machines as one text."""
    lines = lines_to_type(plan)
    return "\n".join(f"# machine {rank}\n{line}" for rank, line in enumerate(lines))


def rendezvous(launcher: LocalConfig, run_id: str) -> list[str]:
    """Returns torchrun's options by which the workers of all machines find each other.

    Raises:
        RequestError: ``launcher.master_addr`` is not known here or cannot be reached.
    """
    if launcher.nodes == 1:
        # Port 0 selects a free port. The address is given because a host's own name often does not resolve.
        return ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", f"--rdzv-id={run_id}"]
    is_first = int(launcher.node_rank == 0)
    return [
        f"--rdzv-endpoint={launcher.master_addr}:{launcher.master_port}",
        # torchrun would compare host names, but a machine's own name often resolves to a loopback address.
        f"--rdzv-conf=is_host={is_first},timeout={JOIN_SECONDS},join_timeout={JOIN_SECONDS}",
        f"--local-addr={local_address(launcher)}",
        f"--rdzv-id={run_id}",
    ]


def network_interface(launcher: LocalConfig) -> str | None:
    """Returns the network interface between the workers; None lets gloo choose."""
    if launcher.nodes == 1:
        return "lo"
    address = local_address(launcher)
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return None


def local_address(launcher: LocalConfig) -> str:
    """Returns the address of this machine from which it reaches the first one.

    Raises:
        RequestError: the first machine's name is not known, or there is no route to it.
    """
    assert launcher.master_addr is not None
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            launcher.master_addr, launcher.master_port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            # For UDP, connect sends nothing: the kernel only looks up the route.
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RequestError(
            f"launcher.master_addr={launcher.master_addr}: this machine cannot reach it ({error.strerror or error}): "
            "name the first machine as the others know it, or give its address"
        ) from error


def wait_for_first(plan: LaunchPlan, seconds: float = JOIN_SECONDS) -> None:
    """Waits on a further machine until the first one has written the run folder.

    Args:
        plan: the run. The configuration of a new one is compared with that of the first machine.
        seconds: longest wait.

    Raises:
        RequestError: the folder does not appear, or its configuration differs.
    """
    first, config = plan.files, plan.config
    deadline = time.monotonic() + seconds
    while not first.exists:
        if time.monotonic() > deadline:
            raise RequestError(
                f"{plan.run_dir} did not appear within {seconds:g} s: start the first machine (launcher.node_rank=0) "
                "and see that run_root is a folder that all machines share"
            )
        time.sleep(0.2)
    if plan.attempt:
        return
    asked, settings = first.settings(), trackers.public_settings(config)
    if isinstance(config, Config) and isinstance(config.backend, AutoConfig):
        # The first machine has decided.
        settings["backend"] = asked.get("backend")
    if keys := differing(asked, settings):
        raise RequestError(
            f"the first machine runs another configuration: {', '.join(keys)}. Type the line that it printed"
        )


def differing(one: dict[str, Any], other: dict[str, Any], prefix: str = "") -> list[str]:
    """Returns the dotted keys whose values differ, except those that may differ between machines."""
    keys = []
    for name in sorted({*one, *other}):
        key = f"{prefix}{name}"
        first, second = one.get(name), other.get(name)
        if key in _MAY_DIFFER or first == second:
            continue
        nested = isinstance(first, dict) and isinstance(second, dict)
        keys += differing(first, second, f"{key}.") if nested else [key]  # type: ignore[arg-type]
    return keys
