"""Builds ORTModule's compiled extensions and our own kernels once per user and loads them from there.

ORTModule would compile into its own folder in site-packages, which is shared, often not writable, and not keyed by
the torch it was compiled for. Here the result goes to a cache folder of the user, one per (Python, torch,
onnxruntime-training), under a file lock, so that workers that start together compile once.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

from ortlaunch.base.errors import RequestError
from ortlaunch.base.ownership import require_own
from ortlaunch.base.programs import add_to_path
from ortlaunch.base.user import user_cache
from ortlaunch.config.backends import require_ort

_PACKAGE = "onnxruntime.training.ortmodule.torch_cpp_extensions"
_GPU_ALLOCATOR = "torch_gpu_allocator"
KERNELS = "ortlaunch_kernels"
"""Our operators for the CPU, which nodes of the graph call; see `ortlaunch.ort.kernels.symbolics`."""
_SOURCES = {
    "aten_op_executor": ["aten_op_executor.cc"],
    "torch_interop_utils": [
        "torch_interop_utils.cc",
        "ctx_pool.cc",
        "custom_function_bw.cc",
        "custom_function_fw.cc",
        "custom_function_shared.cc",
    ],
    _GPU_ALLOCATOR: ["torch_gpu_allocator.cc"],
}
_OUR_SOURCES = Path(__file__).parent / "native"
_CPU_INFO = Path("/proc/cpuinfo")
_MARCH = "ORTLAUNCH_MARCH"
"""Names the target processor of our kernels, for an image that is built on one machine and runs on others."""
# The last source is a template. ORT's own build fills it in and writes it to site-packages.
_TEMPLATE = {"___gpu_identifier___": "cuda", "___gpu_allocator_header___": "CUDACachingAllocator"}


def cache_dir() -> Path:
    """Returns the cache folder for libraries compiled with this Python, torch and onnxruntime-training."""
    import torch

    key = f"{sys.implementation.cache_tag}-{platform.machine()}-torch{torch.__version__}-ort{_ort_version()}"
    return user_cache() / key


def needed() -> list[str]:
    """Returns the libraries for this torch: one always, one for custom functions, and one for CUDA or our kernels."""
    import torch

    from ortlaunch.ort import compat

    names = ["aten_op_executor"]
    if compat.supports_custom_autograd():
        names.append("torch_interop_utils")
    if torch.cuda.is_available():
        names.append(_GPU_ALLOCATOR)
    else:
        names.append(KERNELS)
    return names


def is_built(name: str) -> bool:
    """Whether the cache has this extension for the installed versions."""
    return _library(name).is_file()


def load(name: str) -> ModuleType:
    """Loads one of ORTModule's extensions under the name by which ORTModule imports it, and builds it if necessary.

    Args:
        name: one of `needed`, except `KERNELS`.

    Raises:
        RequestError: there is no compiler, or the build failed.
    """
    qualified = f"{_PACKAGE}.{name}"
    if qualified in sys.modules:
        return sys.modules[qualified]
    module = _import_library(qualified, build(name))
    sys.modules[qualified] = module
    return module


def load_kernels() -> ModuleType:
    """Registers our operators with torch, and builds them if necessary; repeated calls do nothing.

    Returns:
        The library as a module, with functions for what a step does for each parameter.

    Raises:
        RequestError: there is no compiler, or the build failed.
    """
    if KERNELS in sys.modules:
        return sys.modules[KERNELS]
    import torch

    library = build(KERNELS)
    torch.ops.load_library(str(library))
    sys.modules[KERNELS] = _import_library(KERNELS, library)
    return sys.modules[KERNELS]


def build(name: str) -> Path:
    """Compiles the extension into the cache if it is missing, and returns the library's path."""
    from filelock import FileLock

    library = _library(name)
    # A library of another user would run as this one.
    require_own(library.parent, library, use=f"{library.parent.parent} (ORTLAUNCH_CACHE)")
    if library.is_file():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(str(library.with_suffix(".lock"))):
        if not library.is_file():
            _require_compiler()
            _compile(name, library)
    return library


def _library(name: str) -> Path:
    return cache_dir() / (f"{name}-{_kernels_key()}.so" if name == KERNELS else f"{name}.so")


def _kernels_key() -> str:
    """Identifies our sources and the processor, because code compiled for one may not run on another."""
    digest = hashlib.sha256((os.environ.get(_MARCH) or _instructions()).encode())
    for file in sorted(_OUR_SOURCES.iterdir()):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _instructions() -> str:
    """Returns the instruction set of this machine's processor."""
    lines = _CPU_INFO.read_text().splitlines() if _CPU_INFO.is_file() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _compile(name: str, library: Path) -> None:
    from torch.utils import cpp_extension

    add_to_path()
    is_cuda, is_ours = name == _GPU_ALLOCATOR, name == KERNELS
    processor = os.environ.get(_MARCH) or "native"
    folder = _OUR_SOURCES
    if not is_ours:
        folder = _ortmodule_folder() / "torch_cpp_extensions" / ("cuda" if is_cuda else "cpu") / name
    files = [folder / file for file in _SOURCES[name]] if not is_ours else sorted(folder.glob("*.cpp"))
    print(f"ortlaunch: compiling {name} for this torch (once, about half a minute) into {library.parent}", flush=True)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=f".{name}-") as scratch:
        try:
            cpp_extension.load(
                name=name,
                sources=[str(_source(file, Path(scratch))) for file in files],
                build_directory=scratch,
                extra_cflags=["-O3", f"-march={processor}", "-fopenmp"] if is_ours else ["-O2"],
                extra_include_paths=[str(folder), *(_cuda_headers() if is_cuda else ())],
                extra_ldflags=["-lc10_cuda"] if is_cuda else [],
                with_cuda=False,
                is_python_module=False,
            )
        except RuntimeError as error:
            raise RequestError(
                f"ORTModule's extension {name} does not compile with this torch:\n{_last_lines(str(error))}\n"
                "Use backend=eager, or a torch listed as tested in the README."
            ) from error
        (built,) = Path(scratch).glob("*.so")
        # The rename is atomic, so another process sees the complete library or none.
        os.replace(built, library)


def _source(file: Path, scratch: Path) -> Path:
    """Returns the file itself, or for a template its filled-in copy in `scratch`."""
    text = file.read_text()
    if not any(blank in text for blank in _TEMPLATE):
        return file
    for blank, value in _TEMPLATE.items():
        text = text.replace(blank, value)
    filled = scratch / file.name
    filled.write_text(text)
    return filled


def _cuda_headers() -> list[str]:
    """Returns folders with CUDA's headers: of the wheels that came with torch, or else of an installed toolkit."""
    wheels = [Path(entry or ".") / "nvidia" for entry in sys.path]
    candidates = [folder for wheel in wheels for folder in wheel.glob("*/include")]
    candidates.append(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include")
    return [str(folder.absolute()) for folder in candidates if (folder / "cuda_runtime_api.h").is_file()]


def _require_compiler() -> None:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise RequestError(
            f"no C++ compiler ({compiler}) found: ORTModule's ATen extension must be compiled once for this torch. "
            "Install one (Debian, Ubuntu: apt-get install g++; conda: gxx_linux-64) or choose backend=eager."
        )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        raise RequestError(
            f"Python's headers are missing ({header}): ORTModule's ATen extension must be compiled once. "
            "Install them (Debian, Ubuntu: apt-get install python3-dev) or choose backend=eager."
        )


def _import_library(qualified: str, library: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(qualified, str(library))
    spec = importlib.util.spec_from_file_location(qualified, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _ortmodule_folder() -> Path:
    # The folder is found without an import, because ORTModule's extensions must be loaded before it is imported.
    require_ort("backend=ort")
    spec = importlib.util.find_spec("onnxruntime")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "training" / "ortmodule"


def _ort_version() -> str:
    _ortmodule_folder()
    for package in ("onnxruntime-training", "onnxruntime-training-cpu"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def _last_lines(text: str, count: int = 12) -> str:
    return "\n".join(text.strip().splitlines()[-count:])


def main() -> None:
    """``python -m ortlaunch.ort.extension``: builds the libraries for this torch before the first run.

    With CUDA packages it also builds those that only a GPU uses, so that a login node can build for the compute nodes.
    """
    import torch

    from ortlaunch.ort import cuda_libs

    try:
        names = needed()
        if torch.version.cuda and cuda_libs.has_cuda_provider() and _GPU_ALLOCATOR not in names:
            names.append(_GPU_ALLOCATOR)
        for name in names:
            print(build(name))
    except RequestError as error:
        print(f"ortlaunch: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
