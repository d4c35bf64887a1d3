"""A file server that hangs, as a mount of FUSE whose server answers nothing."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_DETACH = 2
"""MNT_DETACH: of a mount that something still waits for."""


@contextmanager
def dead(folder: Path) -> Iterator[None]:
    """Lets every access to a folder hang inside the block; at its end all that waited gets an error.

    Args:
        folder: the folder, over which the dead file system is mounted.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    # Containers often have no FUSE, also those of CI.
    if os.geteuid() != 0 or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("needs root and /dev/fuse")
    server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
        failed = libc.mount(b"dead", os.fsencode(folder), b"fuse", 0, options)
        if failed:
            pytest.skip(f"needs to mount FUSE: {os.strerror(ctypes.get_errno())}")
        try:
            yield
        finally:
            os.close(server)
            server = -1
            libc.umount2(os.fsencode(folder), _DETACH)
    finally:
        if server >= 0:
            os.close(server)
