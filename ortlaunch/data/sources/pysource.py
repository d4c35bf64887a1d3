"""The standard library's source files as training text, which every machine has."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ortlaunch.base.errors import RequestError
from ortlaunch.config.options import option
from ortlaunch.config.schema import TokenDataConfig

if TYPE_CHECKING:
    from ortlaunch.data.source import Share, Source

MAX_BYTES = 8_000_000
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
"""Folders that differ between installations of one Python version."""


@option("data")
@dataclass
class PysourceConfig(TokenDataConfig):
    """Bytes of the Python standard library's own source files."""

    name: str = "pysource"

    def open(self, share: Share) -> Source:
        """Reads the first 8 MB of the standard library's *.py files as bytes, in the order of their names.

        Installed packages and test folders are left out, so that every rank with the same Python reads the same bytes.

        Raises:
            RequestError: this Python has no source files.
        """
        import numpy as np

        from ortlaunch.data.encoding import BYTE_VALUES
        from ortlaunch.data.files import read_bytes
        from ortlaunch.data.source import array_source

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
        return array_source(tokens, self.seq_len, "data=pysource", BYTE_VALUES)


def _source_files(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT)
        for name in sorted(names):
            if name.endswith(".py"):
                yield Path(root, name)
