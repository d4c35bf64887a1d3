"""Finds the lines that make a host wait for its GPU; without a GPU by the operators whose result the host reads."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_READ = ("_local_scalar_dense", "_unique2", "equal", "lift_fresh", "masked_select", "nonzero", "unique_dim")
"""Operators that give the host a value or a shape, or (``lift_fresh``) a tensor made of the host's numbers, which
another device gets by a copy that waits."""
_INDEXED = ("index", "index_put", "index_put_")
_TOOLS = ("torch", "warnings")


class Waits(TorchDispatchMode):
    """The operators within it for which a GPU's host would wait: ``module:line``, and how often.

    torch calls a dispatch mode at each operator, also in the backward, which on the CPU runs in the thread that began
    it. What leaves torch without an operator (``tolist``, ``numpy``) and waits within kernels are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        # A GPU finds the places of a mask first, and the host has to know how many they are.
        by_mask = name in _INDEXED and any(one is not None and one.dtype is torch.bool for one in args[1])
        if name in _READ or by_mask:
            self.lines[asked_by(__name__)] += 1
        return func(*args, **(kwargs or {}))


def asked_by(*modules: str) -> str:
    """The innermost line of this thread that is neither in torch nor in one of `modules`, as ``module:line``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "?")
        if module not in modules and module.partition(".")[0] not in _TOOLS:
            return f"{module}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
