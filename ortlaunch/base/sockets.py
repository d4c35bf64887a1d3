"""The folder for the sockets by which Python's processes hand each other files.

A loader process makes a folder of its own below `/tmp`, and removes it only if it ends in order. One that is killed, or
whose worker dies, leaves it. So all processes of a machine's workers share one folder, which the process above them
removes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import process
from pathlib import Path

from ortlaunch.base.private_folder import PrivateFolder

_VARIABLE = "ORTLAUNCH_SOCKETS"
_LONGEST = 107 - len("/listener-12345678")
"""Bytes of a folder's path in which Python can still name a socket. The kernel takes 107 for all."""


@contextmanager
def socket_folder() -> Iterator[None]:
    """Makes the folder for the processes that are started within the context, and removes it afterwards."""
    try:
        folder = PrivateFolder("sockets")
    except OSError:  # Without room for it, the processes make folders of their own.
        yield
        return
    if len(os.fsencode(folder.path)) > _LONGEST:
        # Those that Python makes have shorter names.
        folder.close()
        yield
        return
    os.environ[_VARIABLE] = str(folder.path)
    try:
        yield
    finally:
        folder.close()


def use_socket_folder() -> None:
    """Makes this process and those that it forks use the folder, if there is one."""
    folder = os.environ.get(_VARIABLE, "")
    if folder and Path(folder).is_dir():
        # multiprocessing has no other way to name the folder. The processes that are started later inherit it.
        process.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]
