"""Folders of runs: nothing is left of what cannot be made, and several users can share a run root."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import save_config, to_config
from ortlaunch.run.making import make_run_folder
from tests.support.users import SHARED_GROUP, needs_root


@pytest.fixture(params=[0o000, 0o002, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def rights(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_run_is_closed_and_the_rest_is_the_umasks(tmp_path: Path, umask: int) -> None:
    run = tmp_path / "runs" / "default" / "one"
    make_run_folder(run)
    assert rights(run) == 0o755 & ~umask
    assert rights(run.parent) == rights(run.parents[1]) == 0o777 & ~umask


def test_a_configuration_is_written_by_its_owner_alone(tmp_path: Path, umask: int) -> None:
    save_config(to_config(compose([])), tmp_path / "config.yaml")
    assert rights(tmp_path / "config.yaml") == 0o644 & ~umask


@pytest.mark.parametrize("mode", [0o1777, 0o3777])
def test_an_experiment_is_as_open_as_a_run_root_that_is_shared(tmp_path: Path, umask: int, mode: int) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    root.chmod(mode)
    make_run_folder(root / "default" / "one")
    assert rights(root / "default") == mode
    assert rights(root / "default" / "one") & 0o022 == 0
    # What its owner says of it later stays.
    (root / "default").chmod(0o700)
    make_run_folder(root / "default" / "two")
    assert rights(root / "default") == 0o700


@needs_root
@pytest.mark.parametrize(("mode", "expected"), [(0o3775, 0o3775), (0o1775, 0o755), (0o775, 0o755)])
def test_only_the_roots_own_group_gets_its_rights(tmp_path: Path, mode: int, expected: int) -> None:
    """Without the set-group-id bit the folder has another group; without the sticky bit others could rename runs."""
    root = tmp_path / "runs"
    root.mkdir()
    os.chown(root, -1, SHARED_GROUP)
    root.chmod(mode)
    make_run_folder(root / "default" / "one")
    assert rights(root / "default") == expected


def test_a_root_that_is_made_is_not_as_open_as_the_folder_of_all(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    make_run_folder(tmp_path / "runs" / "default" / "one")
    assert rights(tmp_path / "runs") & 0o1022 == 0 and rights(tmp_path / "runs" / "default") & 0o1022 == 0


def test_nothing_is_left_of_what_cannot_be_made(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "runs"):
        with pytest.raises(RequestError, match="the folder cannot be made: File name too long"):
            make_run_folder(folder / "default" / ("x" * 300))
        with pytest.raises(RequestError, match="the folder cannot be made: File name too long"):
            make_run_folder(folder / ("x" * 300))
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_nowhere_is_named(tmp_path: Path) -> None:
    link = tmp_path / "runs"
    link.symlink_to("nowhere")
    with pytest.raises(RequestError, match=f"made: {link} is a link to a folder that is not there: choose"):
        make_run_folder(link / "default" / "one")
    assert list(tmp_path.iterdir()) == [link]
