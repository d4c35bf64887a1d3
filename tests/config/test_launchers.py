"""Launchers of installed packages that are broken are refused in one message, and break nothing else."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.config import launchers, schema
from ortlaunch.launch import table
from tests.support.packages import install_metadata

BROKEN = {
    "keyless": ("Keyless", "is no class with a dataclass `config`"),
    "bare": ("Bare", "TypeError"),
    "raises": ("nothing", "cannot be imported"),
}
SOURCE = """
from dataclasses import dataclass
from ortlaunch.launch.launcher import Launcher

class Keyless(Launcher):
    pass

class Bare(Launcher):
    @dataclass
    class config:
        name: str = "bare"
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that announces broken launchers."""
    (tmp_path / "broken_launchers.py").write_text(SOURCE)
    lines = [f"{name} = broken_launchers:{target}" for name, (target, _) in BROKEN.items()]
    install_metadata(tmp_path, "broken", {"ortlaunch.launchers": lines})
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    caches = (launchers.announced_launchers, launchers.load_launcher, table.launcher_named)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()
    sys.modules.pop("broken_launchers", None)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(("name", "words"), [(name, words) for name, (_, words) in BROKEN.items()])
def test_a_broken_launcher_is_refused_by_its_name(name: str, words: str) -> None:
    with pytest.raises(RequestError, match=f"launcher={name}: .*{words}"):
        table.launcher_named(name)


@pytest.mark.usefixtures("package")
def test_broken_launchers_do_not_break_the_others() -> None:
    assert table.queue_names() == ["slurm"]
    assert {"local", "slurm"} <= launchers.launcher_schemas().keys()


@pytest.mark.parametrize("name", ["SingleConfig", "DdpConfig", "DeepSpeedConfig", "FsdpConfig", "AdamWConfig"])
def test_dataclasses_of_options_are_found_where_they_stood(name: str) -> None:
    assert getattr(schema, name).__name__ == name
