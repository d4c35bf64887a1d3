"""Builds ORTModule's compiled ATen extension once per user and loads it from there.

ORTModule would compile into its own folder in site-packages, which is shared, often not writable, and not keyed by
the torch it was compiled for. Here the result goes to a cache folder of the user, one per (Python, torch,
onnxruntime-training), under a file lock, so that workers that start together compile once.
"""

from __future__ import annotations

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

from ortlaunch.errors import RequestError

_PACKAGE = "onnxruntime.training.ortmodule.torch_cpp_extensions"
_SOURCES = {
    "aten_op_executor": ["aten_op_executor.cc"],
    "torch_interop_utils": [
        "torch_interop_utils.cc",
        "ctx_pool.cc",
        "custom_function_bw.cc",
        "custom_function_fw.cc",
        "custom_function_shared.cc",
    ],
}


def cache_dir() -> Path:
    """The user's folder for what is compiled with the Python, torch and onnxruntime-training in use.

    Lies under ``$ORTLAUNCH_CACHE``, else ``$XDG_CACHE_HOME/ortlaunch``, else ``~/.cache/ortlaunch``.
    """
    import torch

    base = os.environ.get("ORTLAUNCH_CACHE")
    if not base:
        base = os.path.join(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "ortlaunch")
    key = f"{sys.implementation.cache_tag}-{platform.machine()}-torch{torch.__version__}-ort{_ort_version()}"
    return Path(base) / key


def load(name: str) -> ModuleType:
    """Loads one of ORTModule's extensions under the name by which ORTModule imports it, building it if need be.

    Args:
        name: ``aten_op_executor`` or ``torch_interop_utils``.

    Raises:
        RequestError: there is no compiler, or the build failed.
    """
    qualified = f"{_PACKAGE}.{name}"
    if qualified in sys.modules:
        return sys.modules[qualified]
    module = _import_library(qualified, build(name))
    sys.modules[qualified] = module
    return module


def build(name: str) -> Path:
    """Compiles the extension into the cache unless it is there already, and returns the library's path."""
    from filelock import FileLock

    folder = cache_dir()
    library = folder / f"{name}.so"
    if library.is_file():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(str(folder / f"{name}.lock")):
        if not library.is_file():
            _require_compiler()
            _compile(name, library)
    return library


def _compile(name: str, library: Path) -> None:
    from torch.utils import cpp_extension

    source_folder = _ortmodule_folder() / "torch_cpp_extensions" / "cpu" / name
    sources = [str(source_folder / file) for file in _SOURCES[name]]
    print(f"ortlaunch: compiling {name} for this torch (once, about half a minute) into {library.parent}", flush=True)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=f".{name}-") as scratch:
        try:
            cpp_extension.load(
                name=name,
                sources=sources,
                build_directory=scratch,
                extra_cflags=["-O2"],
                extra_include_paths=[str(source_folder)],
                with_cuda=False,
                is_python_module=False,
            )
        except RuntimeError as error:
            raise RequestError(
                f"ORTModule's extension {name} does not compile with this torch:\n{_last_lines(str(error))}\n"
                "Use backend=eager, or a torch listed as tested in the README."
            ) from error
        (built,) = Path(scratch).glob("*.so")
        # A rename within the folder: another process sees the whole library or none.
        os.replace(built, library)


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
    # Found without importing: onnxruntime.training.ortmodule must not be imported before its extensions are loaded.
    spec = importlib.util.find_spec("onnxruntime")
    if spec is None or spec.origin is None:
        raise RequestError(
            "backend=ort needs onnxruntime-training: pip install 'ortlaunch[cpu]' (or [cuda]), or choose backend=eager."
        )
    folder = Path(spec.origin).parent / "training" / "ortmodule"
    if not folder.is_dir():
        raise RequestError(
            "the installed onnxruntime has no training part: pip uninstall onnxruntime onnxruntime-gpu, then "
            "pip install 'ortlaunch[cpu]' (or [cuda]); or choose backend=eager."
        )
    return folder


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
    """``python -m ortlaunch.ort.extension``: builds what this torch needs, ahead of the first run."""
    from ortlaunch.ort import compat

    print(build("aten_op_executor"))
    if compat.supports_custom_autograd():
        print(build("torch_interop_utils"))


if __name__ == "__main__":
    main()
