"""Packages that are installed as far as their metadata goes."""

from __future__ import annotations

from pathlib import Path


def install_metadata(folder: Path, package: str, entry_points: dict[str, list[str]]) -> None:
    """Installs the metadata of a package with entry points.

    Args:
        folder: a folder of `sys.path`, made if need be.
        package: the package's name.
        entry_points: the lines ``NAME = MODULE:ATTRIBUTE`` of each group.
    """
    info = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    groups = [f"[{group}]\n" + "".join(f"{line}\n" for line in lines) for group, lines in entry_points.items()]
    (info / "entry_points.txt").write_text("".join(groups))
