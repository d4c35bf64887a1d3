"""The standard library's own source files as training text: real, and on every machine."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import PysourceConfig
from ortlaunch.data.encoding import BYTE_VALUES
from ortlaunch.data.files import read_bytes
from ortlaunch.data.source import Share, Source, array_source

MAX_BYTES = 8_000_000
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
"""Folders that differ between installations of one Python version."""


def open_pysource(cfg: PysourceConfig, share: Share) -> Source:
    """Reads the standard library's *.py files as bytes, in the order of their names, the first 8 MB of them.

    Installed packages and test folders are left out, so that every rank with the same Python reads the same bytes.

    Raises:
        RequestError: This Python has no source files.
    """
    pieces: list[bytes] = []
    size = 0
    for path in _source_files(Path(sysconfig.get_paths()["stdlib"])):
        pieces.append(read_bytes(path))
        size += len(pieces[-1])
        if size >= MAX_BYTES:
            break
    if not pieces:
        raise RequestError("data=pysource: this Python comes without its source files; choose another data source")
    tokens = np.frombuffer(b"".join(pieces), dtype=np.uint8)[:MAX_BYTES]
    return array_source(tokens, cfg.seq_len, "data=pysource", BYTE_VALUES)


def _source_files(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT)
        for name in sorted(names):
            if name.endswith(".py"):
                yield Path(root, name)
