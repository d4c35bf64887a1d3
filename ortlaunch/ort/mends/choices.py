"""The ONNX symbolics for ``torch.where`` and ``masked_fill``.

The gradient of Where that onnxruntime 1.19.2 builds is wrong for a choice with fewer elements than the result. So a
choice gets the result's shape first, and the gradient of Expand sums.
"""

from __future__ import annotations

from typing import Any

from ortlaunch.ort.mends import exporters
from ortlaunch.ort.mends.values import cast, is_floating, sizes


def where(g: Any, condition: Any, chosen: Any = None, other: Any = None, _outputs: int | None = None) -> Any:
    """Exports ``torch.where`` in both of its forms."""
    if chosen is None or other is None:
        return exporters.symbolic("aten::where", 9)(g, condition, chosen, other, _outputs)
    whole = _like(g, chosen, condition, other), _like(g, other, condition, chosen)
    kinds = [value.type().scalarType() for value in whole]
    if "Bool" in kinds and kinds[0] != kinds[1]:
        # The exporter gives no boolean the dtype of a number.
        output = g.original_node.output()
        whole = cast(g, whole[0], output), cast(g, whole[1], output)
    return exporters.symbolic("aten::where", 9)(g, condition, *whole)


def _masked_fill(g: Any, values: Any, mask: Any, value: Any) -> Any:
    """Exports ``masked_fill``; `value` may be a tensor without dimensions."""
    if value.node().kind() in ("onnx::Constant", "prim::Constant"):
        return exporters.symbolic("aten::masked_fill")(g, values, mask, value)
    return where(g, mask, cast(g, value, values).setType(values.type().with_sizes([])), values)


def _like(g: Any, choice: Any, *others: Any) -> Any:
    """Returns a choice with the shape of the result, if a gradient could need it."""
    if choice.node().kind() == "onnx::Constant" or not _is_smaller(choice, others):
        return choice
    whole = choice
    for other in others:
        # Expand makes the shape of both of its operands.
        whole = g.op("Expand", whole, g.op("Shape", other))
    return whole.setType(choice.type().with_sizes([None] * max(_rank(value) for value in (choice, *others))))


def _is_smaller(choice: Any, others: tuple[Any, ...]) -> bool:
    if not is_floating(choice) or any(_rank(value) is None for value in (choice, *others)):
        return False
    return any(_rank(choice) < _rank(other) for other in others) or 1 in sizes(choice)


def _rank(value: Any) -> Any:
    from torch.onnx import symbolic_helper

    return symbolic_helper._get_tensor_rank(value)


SYMBOLICS = {"aten::where": where, "aten::masked_fill": _masked_fill}
