"""The command as a user types it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ortlaunch import cli


def ortlaunch(cwd: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``ortlaunch ARGUMENTS...`` in a folder, with further variables, to its end: for what trains nothing."""
    # A command that this process has run may have set HYDRA_FULL_ERROR.
    inherited = {name: value for name, value in os.environ.items() if name != "HYDRA_FULL_ERROR"}
    return subprocess.run(
        [sys.executable, "-m", "ortlaunch", *arguments],
        cwd=cwd,
        env={**inherited, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def answer(cwd: Path, capfd: pytest.CaptureFixture[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """The same within this process, which saves its start: for what is refused before anything is started."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["ortlaunch", *arguments])
        # Which a command of this process may have set.
        patch.setenv("HYDRA_FULL_ERROR", "0")
        patch.delenv("HYDRA_FULL_ERROR")
        threshold = gc.get_threshold()
        try:
            cli.main()
        finally:
            gc.unfreeze()
            gc.set_threshold(*threshold)
    out, errors = capfd.readouterr()
    code = ended.value.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(["ortlaunch", *arguments], code, out, errors)
