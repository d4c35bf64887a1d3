"""The wheel and the source package, built, and environments outside the checkout with the wheel in them."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FULL = os.environ.get("ORTLAUNCH_TEST_INSTALL") == "1"
_FOREIGN = ("PYTHONPATH", "MLFLOW_TRACKING_URI", "VIRTUAL_ENV", "ORTLAUNCH_JOBS")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One process builds and installs for all tests here."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("wheel"))


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel in it, and a folder to work in that is not below the checkout."""

    python: Path
    folder: Path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """``ortlaunch ARGUMENTS...`` as a user calls it: nothing of the checkout on any path."""
        command = [str(self.python.parent / "ortlaunch"), *arguments]
        return subprocess.run(command, cwd=self.folder, env=_clean(), capture_output=True, text=True, timeout=280)

    def value(self, expression: str) -> str:
        """What Python there says of an expression."""
        code = f"import ortlaunch, importlib.metadata as metadata; print({expression})"
        return subprocess.run(
            [str(self.python), "-c", code], cwd=self.folder, env=_clean(), capture_output=True, text=True, check=True
        ).stdout.strip()


def _clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _FOREIGN}


def build(target: str, folder: Path, source: Path = ROOT) -> Path:
    """Builds a package of a folder, which is this checkout unless another is named."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
    (built,) = folder.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return built


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source package of this checkout."""
    return build("sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """The wheel in an environment of its own.

    With ORTLAUNCH_TEST_INSTALL=1 an empty one, into which ``docker/install.sh`` installs everything. Otherwise the
    packages that the wheel needs are those of the environment that runs the tests, all but its editable ortlaunch: a
    folder that is on the path by a ``.pth`` file has its own ``.pth`` files left unread.
    """
    home = tmp_path_factory.mktemp("installed")
    if FULL:
        script = [str(ROOT / "docker" / "install.sh"), "cpu,digits", str(home / "venv"), str(wheel)]
        subprocess.run(script, env={**_clean(), "PYTHON": sys.executable}, check=True, timeout=1200)
    else:
        subprocess.run([sys.executable, "-m", "venv", str(home / "venv")], check=True, timeout=120)
        site = next((home / "venv").glob("lib/python*/site-packages"))
        (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        install = [str(home / "venv/bin/python"), "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)]
        subprocess.run(install, env=_clean(), check=True, timeout=120)
    (home / "work").mkdir()
    yield Installed(home / "venv/bin/python", home / "work")
