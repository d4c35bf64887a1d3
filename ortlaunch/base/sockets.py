"""The folder for the sockets by which Python's processes hand each other files.

A loader process makes a folder of its own below `/tmp`, and removes it only if it ends in order. One that is killed, or
whose worker dies, leaves it. So all processes of a machine's workers share one folder, which the process above them
removes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import process
from pathlib import Path

from ortlaunch.base.private_folder import PrivateFolder

_VARIABLE = "ORTLAUNCH_SOCKETS"
_LONGEST = 107 - len("/listener-12345678")
"""Bytes of a folder's path in which Python can still name a socket. The kernel takes 107 for all."""


@contextmanager
def socket_folder() -> Iterator[None]:
    """Has this process and those that it starts within the context use one folder, which goes afterwards.

    It is the folder of a process above this one, if there is one.
    """
    if Path(os.environ.get(_VARIABLE) or "/nowhere").is_dir():
        use_socket_folder()
        yield
        return
    folder = _short_folder()
    if folder is None:  # The processes make folders of their own.
        yield
        return
    os.environ[_VARIABLE] = str(folder.path)
    before = process.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    use_socket_folder()
    try:
        yield
    finally:
        process.current_process()._config["tempdir"] = before  # type: ignore[attr-defined]
        del os.environ[_VARIABLE]
        folder.close()


def _short_folder() -> PrivateFolder | None:
    """Makes a folder in which a socket can be named: for temporary files, or where the paths are always short."""
    for place in (tempfile.gettempdir(), "/tmp", "/dev/shm"):
        with suppress(OSError):
            folder = PrivateFolder("sockets", place)
            if len(os.fsencode(folder.path)) <= _LONGEST:
                return folder
            folder.close()
    return None


def use_socket_folder() -> None:
    """Makes this process and those that it forks use the folder, if there is one."""
    folder = os.environ.get(_VARIABLE, "")
    if folder and Path(folder).is_dir():
        # multiprocessing has no other way to name the folder. The processes that are started later inherit it.
        process.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]
