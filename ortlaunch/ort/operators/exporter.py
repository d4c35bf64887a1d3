"""The symbolics of torch's exporter, and their replacement in part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OPSET = 17


def replace(name: str, kind: type, make: Callable[[Callable[..., Any]], Any]) -> None:
    """Replaces an operator's symbolic by one that keeps it. Each ORTModule's constructor leads here again.

    Args:
        name: the operator, as ``aten::add``; one without a symbolic stays as it is.
        kind: the class of the new symbolic; an operator has at most one of each class.
        make: returns the new symbolic for the one that is registered.
    """
    from torch.onnx import register_custom_op_symbolic  # type: ignore[attr-defined]
    from torch.onnx._internal import registration

    group = registration.registry.get_function_group(name)
    original = group.get(OPSET) if group is not None else None
    if original is not None and not _is_replaced_by(kind, original):
        register_custom_op_symbolic(name, make(original), OPSET)


def _is_replaced_by(kind: type, symbolic: Any) -> bool:
    """Whether a symbolic is of this class, or keeps one that is; others may have replaced it since."""
    while symbolic is not None:
        if isinstance(symbolic, kind):
            return True
        symbolic = getattr(symbolic, "original", None)
    return False


def symbolic(name: str, opset: int = OPSET) -> Callable[..., Any]:
    """Returns the exporter's symbolic of an operator.

    Args:
        name: the operator, as ``aten::add``.
        opset: the newest version of the symbolic that is taken.
    """
    from torch.onnx._internal import registration

    own: dict[int, Callable[..., Any]] = registration.registry.get_function_group(name)._functions._base
    return own[max(version for version in own if version <= opset)]
