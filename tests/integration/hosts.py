"""Two test hosts on this machine: network namespaces with an address each, joined by a virtual cable."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Host:
    """One of them."""

    namespace: str
    address: str

    def prefix(self) -> list[str]:
        """What to put before a command so that it runs there."""
        return ["ip", "netns", "exec", self.namespace]


def missing() -> str | None:
    """Why hosts cannot be had here; None where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the command ip is missing (apt-get install iproute2)"
    name = f"ort-{secrets.token_hex(3)}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"no network namespaces here: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return None


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Makes them; they, and what still runs in them, go with the end."""
    tag = secrets.token_hex(3)
    hosts = tuple(Host(f"ort-{tag}-{index}", f"10.77.9.{index + 1}") for index in range(2))
    with ExitStack() as undo:
        for host in hosts:
            _ip("netns", "add", host.namespace)
            undo.callback(_remove, host)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        _ip("link", "add", f"v{tag}0", "netns", hosts[0].namespace, "type", "veth", "peer", f"v{tag}1", "netns",
            hosts[1].namespace)  # fmt: skip
        for index, host in enumerate(hosts):
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", f"v{tag}{index}")
            _ip("-n", host.namespace, "link", "set", f"v{tag}{index}", "up")
        yield hosts


def processes_in(host: Host) -> list[psutil.Process]:
    """What runs there."""
    listing = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=True)
    found = []
    for pid in listing.stdout.split():
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(int(pid)))
    return found


def _remove(host: Host) -> None:
    for process in processes_in(host):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _ip("netns", "delete", host.namespace)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
