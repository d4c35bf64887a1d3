"""Keeps graphs with the shapes that ORTModule infers for them, each beside the export that it was made from.

The inference is a function of the graph, of the installed packages and of our code. The folder of an export stands for
packages and code; the file with the shapes names the graph by a digest of all its bytes, as it was given to the
inference. A graph that differs in a single byte is inferred again.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ortlaunch.base import files
from ortlaunch.base.reading import read_bytes
from ortlaunch.ort.cache import sealed

FILE = "shapes"
"""The file's name in the folder of an export. It holds three parts: a digest of the rest, one of the graph without
shapes, and the graph with them."""
LARGEST = 2 << 30
"""The largest kept file that is read, in bytes; protobuf has the same limit for a graph."""
_DIGEST = hashlib.sha256().digest_size

_folder: Path | None = None
_is_read = False


@contextlib.contextmanager
def kept_in(folder: Path | None, *, is_read: bool) -> Iterator[None]:
    """Makes inferences in the block use the folder of an export.

    Args:
        folder: only its owner may write to it; None keeps nothing.
        is_read: whether a kept graph is used; if not, it is replaced.
    """
    global _folder, _is_read
    before, (_folder, _is_read) = (_folder, _is_read), (folder, is_read)
    try:
        yield
    finally:
        _folder, _is_read = before


def keeping(infer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Makes an inference keep its results and use kept ones, in blocks of `kept_in`.

    Args:
        infer: takes an ``onnx.ModelProto`` and returns one with shapes.
    """

    def inferred(model: Any) -> Any:
        folder = _folder
        if folder is None:
            return _without_random_numbers(infer, model)
        # It changes the graph that it is given.
        digest = hashlib.sha256(model.SerializeToString(deterministic=True)).digest()
        kept = _load(folder / FILE, digest) if _is_read else None
        if kept is not None:
            return kept
        shaped = _without_random_numbers(infer, model)
        _store(folder, digest, shaped.SerializeToString())
        return shaped

    return inferred


def _without_random_numbers(infer: Callable[[Any], Any], model: Any) -> Any:
    """Infers, and leaves Python's random numbers as they are: sympy draws some, and a kept graph draws none."""
    state = random.getstate()
    try:
        return infer(model)
    finally:
        random.setstate(state)


def _load(file: Path, digest: bytes) -> Any | None:
    """Returns the graph that is kept for another one; None if there is none, or the file is damaged."""
    import onnx

    try:
        rest = sealed.opened(read_bytes(file, LARGEST))
        return onnx.load_model_from_string(rest[_DIGEST:]) if rest[:_DIGEST] == digest else None
    except Exception:
        # Whatever the error is, a new inference replaces the file.
        return None


def _store(folder: Path, digest: bytes, shaped: bytes) -> None:
    """Stores a graph atomically where the export itself was stored; a folder that is full or read-only is no error."""
    if not folder.is_dir():
        return
    with contextlib.suppress(OSError):
        files.replace(folder / FILE, sealed.seal(digest + shaped), files.PRIVATE)
