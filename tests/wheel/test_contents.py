"""What the packages contain, and what they say of themselves."""

from __future__ import annotations

import shutil
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import ortlaunch
from tests.docker.test_files import DOCKERFILES, instructions
from tests.wheel.conftest import build

ROOT = Path(__file__).parents[2]


def test_the_wheel_carries_all_that_is_read_at_run_time(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("conf", "jobs"):
        for path in (ROOT / folder).rglob("*.yaml"):
            assert f"ortlaunch/{path.relative_to(ROOT)}" in names
    for path in (ROOT / "ortlaunch" / "ort" / "native").iterdir():
        assert str(path.relative_to(ROOT)) in names
    for path in (ROOT / "slurm" / "job.sh", *(ROOT / "slurm" / "profiles").iterdir()):
        assert f"ortlaunch/{path.relative_to(ROOT)}" in names
    assert "ortlaunch/py.typed" in names
    assert not [name for name in names if "test" in name or name.startswith(("docs", "docker"))]


def test_what_the_images_copy_is_enough_to_build_it(wheel: Path, tmp_path: Path) -> None:
    copied = {
        tuple(tuple(one.words) for one in instructions(path) if one.name == "COPY" and one.stage == 0)
        for path in DOCKERFILES
    }
    (lines,) = copied
    for *sources, target in lines:
        for source in sources:
            there = tmp_path / "src" / target / (Path(source).name if target == "./" else "")
            copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy2
            there.parent.mkdir(parents=True, exist_ok=True)
            copy(ROOT / source, there)
    built = build("wheel", tmp_path / "out", tmp_path / "src")
    assert set(zipfile.ZipFile(built).namelist()) == set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_describes_itself(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(archive.read(name).decode())
    assert metadata["Version"] == ortlaunch.__version__
    assert wheel.name == f"ortlaunch-{ortlaunch.__version__}-py3-none-any.whl"
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.11"} <= set(metadata.get_all("Classifier"))
    assert {"ort", "deepspeed", "cpu", "cuda", "digits", "hf", "metrics", "serve", "server"} <= set(
        metadata.get_all("Provides-Extra")
    )
    assert metadata["Requires-Python"] == "<3.14,>=3.11"


def test_the_version_stands_in_one_place_and_in_the_changelog() -> None:
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()
    assert f"## {ortlaunch.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_source_package_has_all_that_builds_the_wheel_and_the_images(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {
        "pyproject.toml",
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
        "constraints.txt",
        "mkdocs.yml",
        ".dockerignore",
    }
    for folder in ("ortlaunch", "conf", "jobs", "slurm", "docker", "docs"):
        wanted |= {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*") if path.is_file()}
    wanted = {name for name in wanted if "__pycache__" not in name and not name.startswith("docker/secrets/")}
    assert wanted <= names
    assert not [name for name in names if name.startswith(("tests", "docker/secrets/", "runs"))]
