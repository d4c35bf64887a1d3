"""Finds and loads the CUDA 11.8 libraries that onnxruntime-training 1.19.2 links, beside a torch of another CUDA.

They come as wheels (the extra ``cuda``) that lie in ``site-packages/nvidia/*/lib``, where the dynamic loader does not
look. A library that this process has loaded satisfies whoever needs its name, so they are loaded by path, before
onnxruntime. torch's own CUDA 12 or 13 has other names for all of them but ``libcurand.so.10``, whose interface is the
same in both; the one that is loaded first serves both.

Imports neither torch nor onnxruntime.
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
    """A shared library and the wheel that has it."""

    soname: str
    folder: str
    """Its wheel's folder under ``site-packages/nvidia``."""
    requirement: str
    """The wheel as pip takes it."""


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
    # libcudnn.so.8 opens its parts by name when they are first used; each part needs those before it.
    Library("libcudnn_ops_infer.so.8", *_CUDNN),
    Library("libcudnn_ops_train.so.8", *_CUDNN),
    Library("libcudnn_cnn_infer.so.8", *_CUDNN),
    Library("libcudnn_cnn_train.so.8", *_CUDNN),
    Library("libcudnn_adv_infer.so.8", *_CUDNN),
    Library("libcudnn_adv_train.so.8", *_CUDNN),
    Library("libcudnn.so.8", *_CUDNN),
)
"""In loading order: what a library needs comes before it."""


@dataclass(frozen=True)
class Loaded:
    """What became of one library."""

    library: Library
    origin: str | None
    """Its path in site-packages, or "the system's loader" or "this process"; None where it could not be loaded."""
    error: str | None = None
    """The dynamic loader's words where it could not."""


@functools.cache
def prepare() -> tuple[Loaded, ...]:
    """Loads what a CUDA run needs; does it once, and nothing where there is no driver or no CUDA package.

    Returns:
        What became of each library; empty where none is wanted.
    """
    return load() if has_cuda_provider() and driver_error() is None else ()


def load() -> tuple[Loaded, ...]:
    """Loads every library into this process, whether or not there is a driver."""
    return tuple(_load(library) for library in LIBRARIES)


def require() -> None:
    """Makes sure that ONNX Runtime can run on CUDA here, as far as the loader can tell.

    Raises:
        RequestError: the CPU package is installed, there is no driver, or libraries are missing; with what mends it.
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
            f"backend=ort on CUDA needs libraries of CUDA 11.8 that are not found: {names}. {mend(missing)} "
            "(ortlaunch doctor shows each)"
        )


def mend(missing: list[Library]) -> str:
    """The command that brings the missing libraries."""
    requirements = dict.fromkeys(library.requirement for library in missing)
    # Forced: the file may be gone while pip still lists the package.
    return "pip install --force-reinstall --no-deps " + " ".join(requirements)


def has_cuda_provider() -> bool:
    """Whether the onnxruntime that would be imported is built for CUDA."""
    spec = importlib.util.find_spec("onnxruntime")
    return spec is not None and spec.origin is not None and (Path(spec.origin).parent / "capi" / _PROVIDER).is_file()


@functools.cache
def driver_error() -> str | None:
    """None where the NVIDIA driver's library can be loaded, else the dynamic loader's words."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return str(error)
    return None


def driver_cuda_version() -> str:
    """The newest CUDA that the driver runs, as "12.4"; needs a driver."""
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def find(library: Library) -> Path | None:
    """The library's file among the installed wheels; the first on ``sys.path`` that has it."""
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
        # Global, because libcudnn's parts look symbols of cuBLAS up by name.
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
