"""The tested versions of constraints.txt."""

from __future__ import annotations

import importlib.metadata

from packaging.specifiers import SpecifierSet

from tests.gpu.needed import read_pins

DEBIAN = "3.11.2"
"""The Python of Debian 12, with which the README begins. pip calls a release that it must leave out a conflict."""


def test_they_install_on_the_python_of_debian() -> None:
    pins = read_pins()
    installed = {name: importlib.metadata.distribution(name) for name in pins if _is_installed(name, pins[name])}
    assert len(installed) > 50, "next to nothing was looked at"
    wanted = {name: found.metadata.get("Requires-Python") for name, found in installed.items()}
    assert {name: need for name, need in wanted.items() if need and DEBIAN not in SpecifierSet(need)} == {}


def _is_installed(name: str, version: str) -> bool:
    try:
        return importlib.metadata.version(name) == version
    except importlib.metadata.PackageNotFoundError:
        return False
