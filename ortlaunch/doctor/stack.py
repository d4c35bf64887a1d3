"""Checks the Python packages of a run: torch, ONNX Runtime and its libraries, DeepSpeed, NCCL."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterator

from ortlaunch.config import backends
from ortlaunch.doctor.line import Level, Line
from ortlaunch.ort import cuda_libs

_PACKAGES = ("onnxruntime-training", "onnxruntime-training-cpu", "onnxruntime", "onnxruntime-gpu")
_TRAINING = _PACKAGES[:2]
_OLDEST, _NEWEST = (3, 11), (3, 13)
"""The versions of Python that ortlaunch is tested with, as in pyproject.toml."""


def python() -> Iterator[Line]:
    """Checks the interpreter."""
    version = platform.python_version()
    if not _OLDEST <= sys.version_info[:2] <= _NEWEST:
        tested = " to ".join(".".join(map(str, one)) for one in (_OLDEST, _NEWEST))
        yield Line("python", Level.error, f"{version}; ortlaunch needs {tested}")
    elif backends.has_wheels():
        yield Line("python", Level.ok, f"{version}; every backend has packages for it")
    else:
        text = f"{version}; all but backend=ort, ortlaunch check and export of ONNX, which need 3.11"
        yield Line("python", Level.ok, text)


def torch() -> Iterator[Line]:
    """Checks torch, and whether it suits this machine."""
    import torch

    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU"
    yield Line("torch", Level.ok, f"{torch.__version__}, {build}")
    if torch.version.cuda and cuda_libs.driver_error() is None and not torch.cuda.is_available():
        yield Line("torch", Level.warning, "sees no GPU although there is a driver: look at nvidia-smi")
    elif not torch.version.cuda and cuda_libs.driver_error() is None:
        yield Line("torch", Level.warning, "cannot use this machine's GPU: a CUDA build of torch is needed for that")


def driver() -> Iterator[Line]:
    """Checks the NVIDIA driver."""
    error = cuda_libs.driver_error()
    if error is None:
        yield Line("driver", Level.ok, f"NVIDIA driver for CUDA up to {cuda_libs.driver_cuda_version()}")
    else:
        yield Line("driver", Level.ok, "no NVIDIA driver: training runs on the CPU")


def packages() -> Iterator[Line]:
    """Checks which ONNX Runtime is installed; two of them overwrite each other."""
    installed = {name: version for name in _PACKAGES if (version := _version(name)) is not None}
    names = " and ".join(f"{name} {version}" for name, version in installed.items())
    training = [name for name in _TRAINING if name in installed]
    wanted = "cuda" if cuda_libs.driver_error() is None else "ort"
    install = f"pip install 'ortlaunch[{wanted}]'"
    if not training and not backends.has_wheels():
        # Nothing here uses an onnxruntime without the training part, and there is none with it.
        yield Line("onnxruntime", Level.ok, f"{names or 'not installed'}; {backends.why_default()}")
    elif len(installed) > 1:
        # All of these packages share the folder "onnxruntime", so a later one overwrites files of an earlier one.
        remove = f"pip uninstall -y {' '.join(installed)}"
        yield Line(
            "onnxruntime", Level.error, f"{names} are both installed and overwrite each other", _then(remove, install)
        )
    elif installed and not training:
        remove = f"pip uninstall -y {' '.join(installed)}"
        yield Line("onnxruntime", Level.error, f"{names} has no training part", _then(remove, install))
    elif not installed:
        yield Line("onnxruntime", Level.warning, str(backends.why_default()), install)
    elif wanted == "cuda" and not cuda_libs.has_cuda_provider():
        remove = "pip uninstall -y onnxruntime-training-cpu"
        text = f"{names} runs backend=ort on the CPU alone, and this machine has a GPU"
        yield Line("onnxruntime", Level.warning, text, _then(remove, install))
    else:
        yield Line("onnxruntime", Level.ok, names)


def cuda_libraries() -> Iterator[Line]:
    """Checks the CUDA 11.8 libraries that ONNX Runtime was built for."""
    if not cuda_libs.has_cuda_provider():
        yield Line("cuda libraries", Level.ok, "not needed by this onnxruntime")
        return
    # Without a driver the libraries cannot be used yet, but the environment may be meant for another machine.
    bad = Level.error if cuda_libs.driver_error() is None else Level.warning
    for found in cuda_libs.load():
        if found.origin is None:
            fix = cuda_libs.install_command([found.library])
            yield Line(found.library.soname, bad, f"missing: {found.error}", fix)
        else:
            yield Line(found.library.soname, Level.ok, f"found: {found.origin}")


def ortmodule() -> Iterator[Line]:
    """Checks what ORTModule needs with this torch: adaptations, the compiled extension, and its import."""
    import torch

    from ortlaunch.ort import compat, extension

    if not any(_version(name) for name in _TRAINING):
        return
    # This must be the first call, because each step runs only once.
    steps = compat.before_import()
    if steps:
        text = (
            f"ORTModule supports torch 2.4 to 2.6; every run adapts torch {torch.__version__} to it, nothing is to do "
            f"({'; '.join(steps)})"
        )
    else:
        text = f"ORTModule supports torch {torch.__version__} as it is: nothing to adapt"
    yield Line("compatibility", Level.ok, text)
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


def deepspeed() -> Iterator[Line]:
    """Checks DeepSpeed. None of its operators is needed: its optimizer in host memory is torch's own."""
    version = _version("deepspeed")
    if version is None:
        yield Line(
            "deepspeed", Level.ok, "not installed: trainer=deepspeed needs it (pip install 'ortlaunch[deepspeed]')"
        )
    else:
        yield Line("deepspeed", Level.ok, version)


def nccl() -> Iterator[Line]:
    """Checks NCCL, through which CUDA workers communicate."""
    import torch
    from torch import distributed

    if torch.version.cuda is None:
        yield Line("nccl", Level.ok, "not needed by this torch: workers on the CPU talk by Gloo")
    elif not distributed.is_nccl_available():
        yield Line("nccl", Level.error, "this torch has none: device=cuda with several workers needs it")
    else:
        version = torch.cuda.nccl.version()
        yield Line("nccl", Level.ok, ".".join(map(str, version)) if isinstance(version, tuple) else str(version))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _then(*commands: str) -> str:
    return " && ".join(commands)
