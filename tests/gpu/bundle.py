"""``make gpu-bundle``: one file with the tree and the packages that a CUDA machine without a network lacks.

It holds the committed tree (HEAD), the wheels that `needed` finds, and nothing else: torch, its CUDA libraries and
transformers have to be on the machine. There: unpack it, and run ``tests/gpu/prove.sh``.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from packaging.utils import canonicalize_name

from tests.gpu.needed import MACHINE, PYTHON, ROOT, Needed, needed, read_machine, read_pins, read_roots, requirements_in

LARGEST_MIB = 60
WHEELS = "gpu-wheels"
"""The folder of the wheels, beside the tree's own folders in the bundle."""
_SOURCE_ONLY = ("antlr4-python3-runtime", "deepspeed")
"""Packages that are published as source alone. Their wheels hold Python files only."""
_GLIBC = (5, 12, 17, 24, 26, 27, 28)
"""Minor versions of glibc 2 whose wheels are taken; pip does not derive the older ones by itself."""


def main() -> None:
    """Writes the bundle and prints its size and parts."""
    parser = argparse.ArgumentParser(prog="make gpu-bundle", description=__doc__.partition("\n")[0])
    parser.add_argument("--machine", type=Path, default=MACHINE, help="its packages, as pip list --format=freeze")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "ortlaunch-gpu.tar.gz")
    arguments = parser.parse_args()
    machine = read_machine(arguments.machine)
    with tempfile.TemporaryDirectory() as folder:
        wheels = Path(folder)
        found = needed(read_roots(), machine, read_pins(), lambda wanted: _fetch(wanted, wheels))
        if found.conflicts:
            sys.exit("\n".join(["gpu-bundle: the packages do not fit together:", *found.conflicts]))
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        pack(wheels, arguments.out)
        _tell(arguments.out, wheels, found, machine, arguments.machine)
    if arguments.out.stat().st_size > LARGEST_MIB * 2**20:
        sys.exit(f"gpu-bundle: larger than {LARGEST_MIB} MiB")


def _fetch(wanted: dict[str, str], folder: Path) -> dict[str, list[str]]:
    """Downloads or builds wheels; returns the requirements of each package."""
    before = set(folder.iterdir())
    ready = [f"{name}=={version}" for name, version in wanted.items() if name not in _SOURCE_ONLY]
    if ready:
        platforms = [word for minor in _GLIBC for word in ("--platform", f"manylinux_2_{minor}_x86_64")]
        platforms += ["--platform", "manylinux2014_x86_64", "--platform", "linux_x86_64"]
        _pip("download", "--only-binary=:all:", "--python-version", PYTHON, *platforms, "-d", str(folder), *ready)
    for name in set(wanted) & set(_SOURCE_ONLY):
        _pip("wheel", "-w", str(folder), f"{name}=={wanted[name]}")
    new = set(folder.iterdir()) - before
    native = [path.name for path in new if path.name.startswith(_SOURCE_ONLY) and not path.name.endswith("-any.whl")]
    if native:
        sys.exit(f"gpu-bundle: built for this machine alone: {', '.join(native)}")
    return {canonicalize_name(path.name.split("-")[0]): requirements_in(_metadata(path)) for path in new}


def _pip(verb: str, *words: str) -> None:
    """Runs pip without dependencies; ends the program with pip's last lines if it fails."""
    command = [sys.executable, "-m", "pip", verb, "--quiet", "--disable-pip-version-check", "--no-deps", *words]
    # DeepSpeed would compile its operators otherwise. The machine compiles those that a run uses.
    environment = os.environ | {"DS_BUILD_OPS": "0"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        sys.exit(f"gpu-bundle: pip {verb} failed\n{ran.stderr[-2000:]}")


def _metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if name.count("/") == 1 and name.endswith(".dist-info/METADATA")]
        return files.read(name).decode()


def pack(wheels: Path, out: Path) -> None:
    """Packs the committed tree and the wheels."""
    tree = out.with_suffix(".tree")
    subprocess.run(["git", "archive", "--format=tar", f"--output={tree}", "HEAD"], cwd=ROOT, check=True)
    with tarfile.open(out, "w:gz") as bundle:
        with tarfile.open(tree) as files:
            for member in files:
                bundle.addfile(member, files.extractfile(member) if member.isfile() else None)
        for path in sorted(wheels.iterdir()):
            bundle.add(path, f"{WHEELS}/{path.name}")
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
        commit = tarfile.TarInfo(f"{WHEELS}/COMMIT")
        commit.size = len(head)
        bundle.addfile(commit, io.BytesIO(head))
        # A package named `tests` in the machine's own folders would hide a folder without this file.
        bundle.addfile(tarfile.TarInfo("tests/__init__.py"))
    tree.unlink()


def _tell(out: Path, wheels: Path, found: Needed, machine: dict[str, str | None], source: Path) -> None:
    sizes = sorted(((path.stat().st_size / 2**20, path.name) for path in wheels.iterdir()), reverse=True)
    whole = sum(size for size, _ in sizes)
    print(f"{out}: {out.stat().st_size / 2**20:.1f} MiB, with {len(found.wheels)} wheels of {whole:.1f} MiB")
    print("largest: " + ", ".join(f"{name.split('-')[0]} {size:.1f}" for size, name in sizes[:6]))
    print(f"left out, because the machine has them: {len(machine)} packages ({source.name})")
    print("left out, because it needs Python 3.11: onnxruntime-training")
    if subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, check=True).stdout:
        print("left out, because it is not committed: see git status")
    print(f"there: tar xzf {out.name} && tests/gpu/prove.sh --device cuda")


if __name__ == "__main__":
    main()
