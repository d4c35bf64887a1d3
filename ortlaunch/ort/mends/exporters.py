"""Gives the symbolics of torch's exporter itself, whatever others have registered or imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ortlaunch.ort.mends.in_part import OPSET


def symbolic(name: str, opset: int = OPSET) -> Callable[..., Any]:
    """Returns the exporter's symbolic of an operator.

    Args:
        name: the operator, as ``aten::add``.
        opset: the newest version of the symbolic that is taken.
    """
    from torch.onnx._internal import registration

    own: dict[int, Callable[..., Any]] = registration.registry.get_function_group(name)._functions._base
    return own[max(version for version in own if version <= opset)]
