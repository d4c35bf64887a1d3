"""Tells from outside whether a script's workers exchange anything, or train separate copies.

Workers meet in the store that torchrun has for them, where each process group leaves its keys, and then exchange data
over connections of their own, whose bytes the kernel counts.
"""

from __future__ import annotations

import datetime
import importlib
import os
import re
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

NO_GROUP = "they made no process group"
NO_COLLECTIVE = "they made a process group and no collective"
_HANDSHAKE_BYTES = 64
"""gloo's workers send less than this to each other before the first collective, and more with it."""
_QUIET_SECONDS = 5.0
"""How long a process group must be seen without a collective. A script may gather its results at its very end."""
_GROUP = "default_pg/"
_DEVICES_GROUP = re.compile(r"//(?!cpu//)\w+//")
"""In a key: a communicator of a GPU's workers, which only the first collective makes."""
_ESTABLISHED, _CLOSED_BY_PEER = 1, 8
_ASK_ALL, _BY_FAMILY, _INFO = 0x301, 20, 2
_MESSAGE, _HEADER, _CONNECTION = struct.Struct("=LHHLL"), 16, 72
_BYTES = 120
"""Where the kernel's report of a connection has the bytes that were acknowledged, and then those that were received."""


class _Connection(NamedTuple):
    own: int
    other: int
    """The ports of both ends."""
    bytes: int


class Exchange:
    """Looks at the workers of one node until they have exchanged something."""

    def __init__(self) -> None:
        self.is_over = False
        """There is nothing more to find out."""
        self._imports_torch = False
        self._store: Any = None
        self._was_asked = self._has_group = False
        self._quiet_since: float | None = None
        self._looked = 0.0

    def look(self, workers: Mapping[int, Mapping[str, str]], now: float) -> None:
        """Looks at the workers once.

        Args:
            workers: the variables of each worker's process, by its number.
            now: the time in seconds.
        """
        one = next(iter(workers.values()), None)
        if self.is_over or one is None:
            return
        if one.get("WORLD_SIZE", "1") == "1":
            self.is_over = True
            return
        if not self._imports_torch:
            self._imports_torch = all("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in workers)
            return
        self._looked = now
        found = list(_between(workers, is_alone=one.get("GROUP_WORLD_SIZE", "1") == "1"))
        self.is_over = any(connection.bytes > _HANDSHAKE_BYTES for connection in found)
        if found and self._quiet_since is None:
            self._quiet_since = now
        self._has_group |= bool(found)
        if not self._has_group:
            self._ask_store(one)

    def said(self) -> str:
        """Returns why the workers have exchanged nothing; empty if they have, or if that is not known."""
        if self.is_over or not self._imports_torch:
            return ""
        if not self._has_group:
            return NO_GROUP if self._was_asked else ""
        is_quiet = self._quiet_since is not None and self._looked - self._quiet_since >= _QUIET_SECONDS
        return NO_COLLECTIVE if is_quiet else ""

    def _ask_store(self, variables: Mapping[str, str]) -> None:
        """Asks torchrun's store whether there is, or was, a process group."""
        if self._store is None:
            # torchrun, in this process, has imported it.
            distributed = importlib.import_module("torch.distributed")
            place = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
            self._store = distributed.TCPStore(*place, timeout=datetime.timedelta(seconds=2), wait_for_workers=False)
        # Older versions of torch cannot list the keys.
        keys = self._store.list_keys()
        self._was_asked = True
        self._has_group = any(_GROUP in key for key in keys)
        self.is_over |= any(_DEVICES_GROUP.search(key) for key in keys)


def _between(workers: Mapping[int, Mapping[str, str]], *, is_alone: bool) -> Iterator[_Connection]:
    """Yields the connections from worker to worker; of several nodes all connections but those to the store."""
    inodes = {pid: set(_sockets(pid)) for pid in workers}
    kernel = _connections()
    of_workers = [[kernel[inode] for inode in own & kernel.keys()] for own in inodes.values()]
    stores = {int(own.get("MASTER_PORT", "0")) for own in workers.values()}
    for number, own in enumerate(of_workers):
        others = {(one.other, one.own) for at, rest in enumerate(of_workers) if at != number for one in rest}
        for one in own:
            if (one.own, one.other) in others or (not is_alone and one.other not in stores):
                yield one


def _sockets(pid: int) -> Iterator[int]:
    """Yields the inodes of a process's sockets."""
    with os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with suppress(OSError):
                name = str(Path(entry.path).readlink())
                if name.startswith("socket:["):
                    yield int(name[8:-1])


def _connections() -> dict[int, _Connection]:
    """Returns the machine's TCP connections by the inode of their socket, as Linux's sock_diag reports them."""
    found: dict[int, _Connection] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 4) as kernel:
        kernel.settimeout(1.0)
        for family in (socket.AF_INET, socket.AF_INET6):
            states = 1 << _ESTABLISHED | 1 << _CLOSED_BY_PEER
            asked = struct.pack("=BBBBI48x", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, states)
            kernel.send(_MESSAGE.pack(_HEADER + len(asked), _BY_FAMILY, _ASK_ALL, 0, 0) + asked)
            while _take(kernel.recv(1 << 17), found):
                pass
    return found


def _take(answer: bytes, found: dict[int, _Connection]) -> bool:
    """Takes the connections from a part of the kernel's answer; returns whether another part follows."""
    while answer:
        length, kind, *_ = _MESSAGE.unpack_from(answer)
        if kind != _BY_FAMILY:
            return False
        message, answer = answer[_HEADER:length], answer[(length + 3) & ~3 :]
        ports, (inode,) = struct.unpack_from("!HH", message, 4), struct.unpack_from("=I", message, _CONNECTION - 4)
        attributes = message[_CONNECTION:]
        while attributes:
            size, name = struct.unpack_from("=HH", attributes)
            if name == _INFO and size >= 4 + _BYTES + 16:
                found[inode] = _Connection(*ports, sum(struct.unpack_from("=QQ", attributes, 4 + _BYTES)))
            attributes = attributes[(size + 3) & ~3 :]
    return True
