"""Which backends this Python can run, found without importing torch or ONNX Runtime."""

from __future__ import annotations

import importlib.util
import platform
import sys
from pathlib import Path

from ortlaunch.base.errors import RequestError

DEFAULT = "default"
"""The option of the group `backend` that nobody has to choose; see `default_backend`."""
NEWEST_PYTHON = (3, 11)
"""The newest Python that onnxruntime-training has wheels for; there will be no further release."""
OTHERWISE = "or choose backend=eager or compile"


def default_backend() -> str:
    """Returns the backend of a run that names none: ort where onnxruntime-training is installed, else eager.

    Eager runs on each machine; torch.compile needs a C++ compiler or Triton.
    """
    return "ort" if why_no_ort("") is None else "eager"


def why_default() -> str | None:
    """Returns why the default backend is not ort here, in one line; None if it is."""
    why = why_no_ort("backend=ort")
    return None if why is None else f"backend={default_backend()} by default: {why}"


def require_ort(what: str, otherwise: str = OTHERWISE) -> None:
    """Checks that ONNX Runtime's training part is installed.

    Args:
        what: what needs it, for the message.
        otherwise: what may be done instead; empty for nothing.

    Raises:
        RequestError: it is not installed; the message says how to get it.
    """
    why = why_no_ort(what)
    if why is not None:
        raise RequestError(f"{why}: {remedy()}{otherwise and f', {otherwise}'}")


def why_no_ort(what: str) -> str | None:
    """Returns why something that needs ORTModule cannot run in this Python; None if it can.

    It is judged by the installed files.

    Args:
        what: what needs it, for the message.
    """
    absence = _absence()
    return None if absence is None else f"{what} needs onnxruntime-training, {absence}"


def _absence() -> str | None:
    """Returns why ORTModule is not there, as the end of a sentence about onnxruntime-training; None if it is."""
    folders = _folders_of("onnxruntime")
    if any((folder / "training" / "ortmodule" / "__init__.py").is_file() for folder in folders):
        return None
    if not has_wheels():
        newest = ".".join(map(str, NEWEST_PYTHON))
        return f"which has wheels up to Python {newest} only, and this is Python {platform.python_version()}"
    if folders:
        return "and the installed onnxruntime has no training part"
    return "which is not installed"


def has_wheels() -> bool:
    """Returns whether onnxruntime-training can be installed from wheels in this Python."""
    return sys.version_info[:2] <= NEWEST_PYTHON


def remedy() -> str:
    """Returns how to get ONNX Runtime's training part."""
    install = "pip install 'ortlaunch[ort]' (or [cuda])"
    if not has_wheels():
        return f"use Python {'.'.join(map(str, NEWEST_PYTHON))} and {install}"
    remove = "pip uninstall onnxruntime onnxruntime-gpu, then " if _folders_of("onnxruntime") else ""
    return remove + install


def _folders_of(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    return [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or []]
