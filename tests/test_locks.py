"""Locks that are only looked at."""

from __future__ import annotations

import os
from pathlib import Path

from ortlaunch.base.locks import exclusive, is_held


def test_a_look_sees_a_lock_and_takes_none(tmp_path: Path) -> None:
    lock, other = tmp_path / "a lock", tmp_path / "other"
    assert is_held(lock) is False
    assert not lock.exists()
    with exclusive(lock), exclusive(other):
        assert is_held(lock) is True
        os.link(lock, tmp_path / "the same")
        assert is_held(tmp_path / "the same") is True
    assert is_held(lock) is False


def test_what_is_no_file_is_not_known_to_be_held(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert is_held(tmp_path / "link") is None
    os.mkfifo(tmp_path / "fifo")
    assert is_held(tmp_path / "fifo") is False
