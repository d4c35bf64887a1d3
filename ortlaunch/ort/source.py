"""Lines of the model's source: which one calls torch, and what it says."""

from __future__ import annotations

import ast
import contextlib
import linecache
import re
import sys
import warnings
from pathlib import Path
from types import FrameType

import torch

TORCH_FOLDER = str(Path(torch.__file__).parent)
OUR_FOLDER = str(Path(__file__).parent)
"""The folder of code that runs between a model and torch."""
_ORT_FOLDER = str(Path(torch.__file__).parents[1] / "onnxruntime")
"""ORTModule replaces some functions of torch."""
_FRAME = re.compile(r"^(?P<file>.+)\((?P<line>\d+)\): ")

SourceLine = tuple[str, int]
"""File and line number."""


def asking_place() -> SourceLine:
    """Returns the line of the model that called torch: the innermost frame outside torch and this package."""
    frame: FrameType | None = sys._getframe(1)
    between = (TORCH_FOLDER, OUR_FOLDER, _ORT_FOLDER, warnings.__file__)
    while frame is not None and frame.f_code.co_filename.startswith(between):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)


def place_in_stack(stack: str) -> SourceLine | None:
    """Returns the innermost line of the model's own source in an exported node's stack, or the innermost of all."""
    frames = [match for match in map(_FRAME.match, stack.splitlines()) if match]
    own = [frame for frame in frames if not frame["file"].startswith((TORCH_FOLDER, OUR_FOLDER))]
    chosen = next(iter(own or frames), None)
    return (chosen["file"], int(chosen["line"])) if chosen else None


def location(place: SourceLine) -> str:
    """Returns a place as ``file:line``."""
    path = Path(place[0])
    with contextlib.suppress(ValueError):
        path = path.relative_to(Path.cwd())
    return f"{path}:{place[1]}"


def statement_at(filename: str, line: int) -> str:
    """Returns the statement on this line of a source file, on one line; of a compound statement only its head."""
    source = "".join(linecache.getlines(filename))
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return linecache.getline(filename, line).strip()
    holding = [
        node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    if not holding:
        return linecache.getline(filename, line).strip()
    node = max(holding, key=lambda one: (one.lineno, -(one.end_lineno or 0)))
    body = getattr(node, "body", None)
    last = body[0].lineno - 1 if body and body[0].lineno > node.lineno else node.end_lineno or node.lineno
    lines = source.splitlines()[node.lineno - 1 : max(last, node.lineno)]
    return " ".join(text.strip() for text in lines)
