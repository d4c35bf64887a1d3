"""Finds and loads the CUDA 11.8 libraries that onnxruntime-training 1.19.2 links, next to a torch of another CUDA.

They come as wheels (the extra ``cuda``) in ``site-packages/nvidia/*/lib``, where the dynamic loader does not search. A
library that is already loaded is found by its name, so they are loaded by path before onnxruntime. torch's own CUDA 12
or 13 uses other names for all of them except ``libcurand.so.10``. Its interface is the same in both, so the library
that is loaded first serves both.

This module imports neither torch nor onnxruntime.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from ortlaunch.base.errors import RequestError

_PROVIDER = "libonnxruntime_providers_cuda.so"


@dataclass(frozen=True)
class Library:
    """A shared library and the wheel that contains it."""

    soname: str
    folder: str
    """The wheel's folder under ``site-packages/nvidia``."""
    requirement: str
    """The wheel's requirement for pip."""


_CUDART = ("cuda_runtime", "nvidia-cuda-runtime-cu11==11.8.89")
_CUBLAS = ("cublas", "nvidia-cublas-cu11==11.11.3.6")
_CUFFT = ("cufft", "nvidia-cufft-cu11==10.9.0.58")
_CURAND = ("curand", "nvidia-curand-cu11==10.3.0.86")
_CUDNN = ("cudnn", "nvidia-cudnn-cu11==8.9.6.50")

LIBRARIES = (
    Library("libcudart.so.11.0", *_CUDART),
    Library("libcublasLt.so.11", *_CUBLAS),
    Library("libcublas.so.11", *_CUBLAS),
    Library("libcufft.so.10", *_CUFFT),
    Library("libcurand.so.10", *_CURAND),
    # libcudnn.so.8 opens its parts by name at their first use; each part needs the parts before it.
    Library("libcudnn_ops_infer.so.8", *_CUDNN),
    Library("libcudnn_ops_train.so.8", *_CUDNN),
    Library("libcudnn_cnn_infer.so.8", *_CUDNN),
    Library("libcudnn_cnn_train.so.8", *_CUDNN),
    Library("libcudnn_adv_infer.so.8", *_CUDNN),
    Library("libcudnn_adv_train.so.8", *_CUDNN),
    Library("libcudnn.so.8", *_CUDNN),
)
"""The libraries in loading order: each one comes after those it needs."""


@dataclass(frozen=True)
class Loaded:
    """The result of loading one library."""

    library: Library
    origin: str | None
    """The path in site-packages, or "the system's loader" or "this process"; None if it could not be loaded."""
    error: str | None = None
    """The dynamic loader's error, if any."""


@functools.cache
def prepare() -> tuple[Loaded, ...]:
    """Loads the libraries for a CUDA run once; does nothing without a driver or a CUDA package.

    Returns:
        The result for each library; empty if none is needed.
    """
    return load() if has_cuda_provider() and driver_error() is None else ()


def load() -> tuple[Loaded, ...]:
    """Loads all libraries into this process, whether or not there is a driver."""
    return tuple(_load(library) for library in LIBRARIES)


def require() -> None:
    """Checks that ONNX Runtime can run on CUDA here, as far as the loader can tell.

    Raises:
        RequestError: the CPU package is installed, there is no driver, or libraries are missing; with the remedy.
    """
    if not has_cuda_provider():
        raise RequestError(
            "device=cuda with backend=ort needs onnxruntime-training's CUDA build, and the installed one is for the "
            "CPU: pip uninstall onnxruntime-training-cpu, then pip install 'ortlaunch[cuda]'; or choose backend=eager"
        )
    error = driver_error()
    if error is not None:
        raise RequestError(f"device=cuda and there is no NVIDIA driver ({error}): choose device=cpu")
    missing = [found.library for found in prepare() if found.origin is None]
    if missing:
        names = ", ".join(library.soname for library in missing)
        raise RequestError(
            f"backend=ort on CUDA needs libraries of CUDA 11.8 that are not found: {names}. {install_command(missing)} "
            "(ortlaunch doctor shows each)"
        )


def install_command(missing: list[Library]) -> str:
    """Returns the command that installs the missing libraries."""
    requirements = dict.fromkeys(library.requirement for library in missing)
    # The installation is forced, because a file may be missing although pip lists its package.
    return "pip install --force-reinstall --no-deps " + " ".join(requirements)


def has_cuda_provider() -> bool:
    """Whether the onnxruntime that would be imported is built for CUDA."""
    spec = importlib.util.find_spec("onnxruntime")
    return spec is not None and spec.origin is not None and (Path(spec.origin).parent / "capi" / _PROVIDER).is_file()


@functools.cache
def driver_error() -> str | None:
    """Returns the dynamic loader's error for the NVIDIA driver's library, or None if it can be loaded."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return str(error)
    return None


def driver_cuda_version() -> str:
    """Returns the newest CUDA version of the driver, such as "12.4"; needs a driver."""
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def find(library: Library) -> Path | None:
    """Returns the library's file among the installed wheels; the first entry of ``sys.path`` that has it wins."""
    for entry in sys.path:
        file = Path(entry or ".") / "nvidia" / library.folder / "lib" / library.soname
        if file.is_file():
            return file.absolute()
    return None


def _load(library: Library) -> Loaded:
    if _is_loaded(library.soname):
        return Loaded(library, "this process")
    file = find(library)
    try:
        # The symbols are global, because libcudnn's parts look up symbols of cuBLAS by name.
        ctypes.CDLL(str(file or library.soname), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        return Loaded(library, None, str(error))
    return Loaded(library, str(file) if file else "the system's loader")


def _is_loaded(soname: str) -> bool:
    try:
        ctypes.CDLL(soname, mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return True
