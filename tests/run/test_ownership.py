"""Whose a folder is: what another user may have written is named and refused, unless the user trusts it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ortlaunch.base import ownership
from ortlaunch.base.errors import RequestError
from ortlaunch.base.ownership import closed_to_others, require_own, why_foreign
from ortlaunch.run.checkpoints import Store
from tests.support.users import SHARED_GROUP, give_away, needs_root, share


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir(mode=0o755)
    return path


def test_a_folder_of_this_user_or_of_root_is_believed(folder: Path) -> None:
    assert why_foreign(folder) is None
    assert why_foreign(Path("/etc/hostname")) is None
    assert why_foreign(folder / "missing") is None


@needs_root
def test_a_folder_of_another_user_is_not(folder: Path) -> None:
    give_away(folder)
    assert why_foreign(folder) == "belongs to the user nobody"
    link = folder.with_name("link")
    link.symlink_to(folder)
    assert why_foreign(link) == "belongs to the user nobody"
    with pytest.raises(
        RequestError, match=re.escape(f"resume: {folder} belongs to the user nobody. What it holds could")
    ):
        require_own(folder, use="resume")


def test_a_folder_that_every_user_may_write_is_not(folder: Path) -> None:
    folder.chmod(0o1777)
    with pytest.raises(
        RequestError, match=re.escape("can be written by every user. Take the right from others: chmod")
    ):
        require_own(folder, use="resume")


@needs_root
def test_a_folder_that_a_group_of_several_users_may_write_is_not(folder: Path) -> None:
    share(folder, 0o2775)
    assert why_foreign(folder) == f"can be written by the group {ownership._group(SHARED_GROUP)}"
    share(folder, 0o2755)
    assert why_foreign(folder) is None


def test_the_users_own_group_may_write_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With umask 002 and a group for each user, every folder is like that."""
    folder.chmod(0o775)
    monkeypatch.setattr(ownership, "_is_private", lambda group, owner: (group, owner) == (os.getegid(), os.geteuid()))
    assert why_foreign(folder) is None
    # Then an access list may name others, to whom the group's rights apply too.
    monkeypatch.setattr(ownership, "_has_access_list", lambda path: True)
    assert why_foreign(folder) is not None


def test_which_group_is_the_users_own() -> None:
    assert ownership._is_private(0, 0)
    assert not ownership._is_private(4, 0)
    unknown = 3_999_999
    assert ownership._is_private(unknown, unknown) and not ownership._is_private(unknown + 1, unknown)


def test_a_folder_that_is_trusted_is_believed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.chmod(0o777)
    for trusted, believed in ((folder, True), (folder.parent, True), (folder / "inner", False), ("", False)):
        monkeypatch.setenv(ownership.TRUST, f"/nowhere:{trusted}")
        assert (why_foreign(folder) is None) is believed


def test_what_a_launch_creates_is_closed_whatever_the_umask_is(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with closed_to_others():
            (tmp_path / "inner").mkdir()
        (tmp_path / "outer").mkdir()
        store = Store(tmp_path / "checkpoints", keep=1)
        (store.begin(1) / "weights").write_text("")
        made = store.commit(1, {})
    finally:
        os.umask(before)
    assert (tmp_path / "inner").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "outer").stat().st_mode & 0o777 == 0o777
    for path in (store.folder, made, made / "manifest.json"):
        assert not path.stat().st_mode & 0o022, path
