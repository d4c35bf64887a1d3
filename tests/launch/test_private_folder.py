"""Temporary folders go with their process; what a killed one has left goes with the next one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ortlaunch.base import private_folder
from ortlaunch.base.private_folder import PrivateFolder

_HOLDER = """
import sys, time
from ortlaunch.base.private_folder import PrivateFolder
folder = PrivateFolder("estimate")
(folder.path / "config.yaml").write_text("key: value")
print(folder.path, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def test_a_folder_goes_with_its_block(tmp_path: Path) -> None:
    with PrivateFolder("probe") as folder:
        (folder / "probe.json").write_text("{}")
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not list(tmp_path.iterdir())


def test_the_folder_of_a_killed_process_goes_with_the_next_one_and_not_before() -> None:
    with subprocess.Popen([sys.executable, "-c", _HOLDER], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        try:
            left = Path(holder.stdout.readline().strip())
            PrivateFolder("check").close()
            assert (left / "config.yaml").is_file()
        finally:
            holder.kill()
    assert left.is_dir()
    PrivateFolder("check").close()
    assert not left.exists()


def test_what_is_not_a_left_folder_of_this_machine_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_lock, aim, link = tmp_path / "ortlaunch-report", tmp_path / "aim", tmp_path / "ortlaunch-link"
    without_lock.mkdir()
    aim.mkdir()
    link.symlink_to(aim)
    monkeypatch.setattr(private_folder.platform, "node", lambda: "another-machine")
    elsewhere = PrivateFolder("estimate")
    (aim / ".in-use").write_bytes((elsewhere.path / ".in-use").read_bytes())
    monkeypatch.undo()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    private_folder.os.close(elsewhere._lock)  # As if its process had ended.
    PrivateFolder("estimate").close()
    assert without_lock.is_dir() and link.is_symlink() and (aim / ".in-use").is_file() and elsewhere.path.is_dir()
