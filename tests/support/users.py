"""Files as if another user had made them, and what other users can reach."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make files of another user")

OTHER_USER = 65534
"""The user nobody, which every Linux has."""
SHARED_GROUP = 65534
"""A group that is nobody's own here."""


def give_away(path: Path) -> None:
    """Makes another user the owner of a file, or of a folder with all that is in it."""
    for one in (path, *path.rglob("*")):
        os.chown(one, OTHER_USER, SHARED_GROUP, follow_symlinks=False)


def share(path: Path, mode: int) -> None:
    """Gives a group of several users the rights of a mode."""
    os.chown(path, -1, SHARED_GROUP)
    path.chmod(mode)


@contextmanager
def folder_for_all() -> Iterator[Path]:
    """A folder that every user may reach. pytest gives its own to one user alone, each time that it begins."""
    folder = Path(tempfile.mkdtemp(prefix="ortlaunch-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def python_for_all(folder: Path) -> str | None:
    """A Python with the packages of the tests that every user may run; None if there is none."""
    here = folder / "python"
    system = shutil.which(f"python{sys.version_info.major}.{sys.version_info.minor}", path="/usr/bin:/usr/local/bin")
    for base in (None, system):
        program = sys.executable
        if base is not None:
            subprocess.run([base, "-m", "venv", "--without-pip", str(here)], check=True, capture_output=True)
            packages = here / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
            (packages / "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
            program = str(here / "bin" / "python3")
        words = ["setpriv", "--reuid=nobody", "--clear-groups", "env", "HOME=/none", program, "-c", "import omegaconf"]
        if subprocess.run(words, capture_output=True, check=False).returncode == 0:
            return program
    return None
