"""Registers the symbolics of all operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ortlaunch.ort.operators import arithmetic, broadcasting, forms, noise, recurrent, standard, table, torch_calls

_OPSET = 17


def register() -> None:
    """Registers the symbolics for training; call it after the constructor of an ORTModule, which registers its own."""
    register_standard()
    for subject in (arithmetic, forms, noise, recurrent):
        _register(subject.SYMBOLICS)
    torch_calls.register()
    arithmetic.register_range()
    table.register()
    broadcasting.register()


def register_standard() -> None:
    """Registers those symbolics that write standard ONNX operators, which any runtime has."""
    _register(standard.SYMBOLICS)


def _register(symbolics: Mapping[str, Callable[..., Any]]) -> None:
    from torch.onnx import register_custom_op_symbolic  # type: ignore[attr-defined]

    for name, symbolic in symbolics.items():
        register_custom_op_symbolic(name, symbolic, _OPSET)
