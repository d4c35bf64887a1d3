"""``ortlaunch doctor``: what this environment has, what it lacks for ONNX Runtime, and the command that mends it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import io
import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from ortlaunch.ort import cuda_libs

_PACKAGES = ("onnxruntime-training", "onnxruntime-training-cpu", "onnxruntime", "onnxruntime-gpu")
_TRAINING = _PACKAGES[:2]


class Level(Enum):
    """How bad a line is; an error means that ``backend=ort`` will not run as asked."""

    ok = "ok"
    warning = "warning"
    error = "error"


@dataclass(frozen=True)
class Line:
    """One thing that was looked at."""

    name: str
    level: Level
    text: str
    mend: str | None = None
    """The command that mends it."""


def main(arguments: list[str]) -> int:
    """Prints the report.

    Returns:
        0, or 1 where a line is an error.
    """
    parser = argparse.ArgumentParser(prog="ortlaunch doctor", description="Examines this environment.")
    parser.add_argument("--json", action="store_true", help="print the lines as JSON, for scripts")
    wants_json = parser.parse_args(arguments).json
    lines = examine()
    healthy = all(line.level is not Level.error for line in lines)
    print(_json(lines, healthy) if wants_json else _table(lines))
    return 0 if healthy else 1


def examine() -> list[Line]:
    """Looks at everything, also after something that is broken."""
    lines: list[Line] = []
    for name, look in _LOOKS.items():
        try:
            # What libraries say while they are imported is no part of the report.
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                lines += look()
        # Whatever a broken installation raises is what this command is for.
        except Exception as error:
            lines.append(Line(name, Level.error, str(error) or type(error).__name__))
    return lines


def _python() -> Iterator[Line]:
    version = platform.python_version()
    if sys.version_info[:2] == (3, 11):
        yield Line("python", Level.ok, version)
    else:
        yield Line("python", Level.error, f"{version}; onnxruntime-training's wheels and ortlaunch need 3.11")


def _torch() -> Iterator[Line]:
    import torch

    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU"
    yield Line("torch", Level.ok, f"{torch.__version__}, {build}")
    if torch.version.cuda and cuda_libs.driver_error() is None and not torch.cuda.is_available():
        yield Line("torch", Level.warning, "sees no GPU although there is a driver: look at nvidia-smi")
    elif not torch.version.cuda and cuda_libs.driver_error() is None:
        yield Line("torch", Level.warning, "cannot use this machine's GPU: a CUDA build of torch is needed for that")


def _driver() -> Iterator[Line]:
    error = cuda_libs.driver_error()
    if error is None:
        yield Line("driver", Level.ok, f"NVIDIA driver for CUDA up to {cuda_libs.driver_cuda_version()}")
    else:
        yield Line("driver", Level.ok, "no NVIDIA driver: training runs on the CPU")


def _packages() -> Iterator[Line]:
    installed = {name: version for name in _PACKAGES if (version := _version(name)) is not None}
    names = " and ".join(f"{name} {version}" for name, version in installed.items())
    training = [name for name in _TRAINING if name in installed]
    wanted = "cuda" if cuda_libs.driver_error() is None else "cpu"
    install = f"pip install 'ortlaunch[{wanted}]'"
    if len(installed) > 1:
        # All of them are the folder "onnxruntime": whoever came last has overwritten part of the others.
        remove = f"pip uninstall -y {' '.join(installed)}"
        yield Line(
            "onnxruntime", Level.error, f"{names} are both installed and overwrite each other", _then(remove, install)
        )
    elif installed and not training:
        remove = f"pip uninstall -y {' '.join(installed)}"
        yield Line("onnxruntime", Level.error, f"{names} has no training part", _then(remove, install))
    elif not installed:
        yield Line("onnxruntime", Level.error, "onnxruntime-training is not installed: backend=ort needs it", install)
    elif wanted == "cuda" and not cuda_libs.has_cuda_provider():
        remove = "pip uninstall -y onnxruntime-training-cpu"
        text = f"{names} runs backend=ort on the CPU alone, and this machine has a GPU"
        yield Line("onnxruntime", Level.warning, text, _then(remove, install))
    else:
        yield Line("onnxruntime", Level.ok, names)


def _cuda_libraries() -> Iterator[Line]:
    if not cuda_libs.has_cuda_provider():
        yield Line("cuda libraries", Level.ok, "not needed by this onnxruntime")
        return
    # Without a driver nothing can use them yet; the environment may be made for a machine that has one.
    bad = Level.error if cuda_libs.driver_error() is None else Level.warning
    for found in cuda_libs.load():
        if found.origin is None:
            mend = cuda_libs.mend([found.library])
            yield Line(found.library.soname, bad, f"missing: {found.error}", mend)
        else:
            yield Line(found.library.soname, Level.ok, f"found: {found.origin}")


def _ortmodule() -> Iterator[Line]:
    from ortlaunch.ort import compat, extension

    if not any(_version(name) for name in _TRAINING):
        return
    # Looked for before the layer is in place: each step does itself once.
    steps = compat.before_import()
    yield Line("compatibility", Level.ok, ", ".join(steps) if steps else "this torch needs none")
    missing = [name for name in extension.needed() if not extension.is_built(name)]
    for name in extension.needed():
        if name not in missing:
            yield Line("extension", Level.ok, f"{name} is built, in {extension.cache_dir()}")
    if missing:
        text = f"{' and '.join(missing)} not built yet for this torch: the first run does it, in about half a minute"
        yield Line("extension", Level.warning, text, f"{sys.executable} -m ortlaunch.ort.extension")
        return
    from ortlaunch.ort import session

    session.import_ortmodule()
    yield Line("ortmodule", Level.ok, "imports")


_LOOKS: dict[str, Callable[[], Iterator[Line]]] = {
    "python": _python,
    "torch": _torch,
    "driver": _driver,
    "onnxruntime": _packages,
    "cuda libraries": _cuda_libraries,
    "ortmodule": _ortmodule,
}


def _table(lines: list[Line]) -> str:
    width = max(len(line.name) for line in lines)
    rows = []
    for line in lines:
        rows.append(f"{line.level.value:<8} {line.name:<{width}}  {line.text}")
        if line.mend is not None:
            rows.append(f"{'':<8} {'':<{width}}  mend: {line.mend}")
    return "\n".join(rows)


def _json(lines: list[Line], healthy: bool) -> str:
    plain = [dataclasses.asdict(line) | {"level": line.level.value} for line in lines]
    return json.dumps({"healthy": healthy, "lines": plain}, indent=2)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _then(*commands: str) -> str:
    return " && ".join(commands)
