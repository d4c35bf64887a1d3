"""Replaces implicit padding of convolutions in an exported graph by explicit padding.

torch's exporter writes ``padding="same"`` as ONNX's ``auto_pad``. In onnxruntime 1.19.2 ConvGrad ignores that attribute
and reads beyond its input, and Conv refuses it with a dilation. Both compute correctly with explicit ``pads``.
"""

from __future__ import annotations

from typing import Any

from onnx import helper

_SAME = (b"SAME_UPPER", b"SAME_LOWER")


def pad_explicitly(graph: Any) -> None:
    """Replaces ``auto_pad`` of every Conv by the equivalent ``pads``, in place.

    Args:
        graph: an exported ``onnx.GraphProto``. Convolutions with ``auto_pad`` have stride 1, as torch requires.
    """
    for node in graph.node:
        if node.op_type != "Conv" or node.domain not in ("", "ai.onnx"):
            continue
        values = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        mode = values.pop("auto_pad", b"NOTSET")
        if mode == b"NOTSET":
            continue
        if mode in _SAME:
            kernel = values["kernel_shape"]
            dilations = values.get("dilations") or [1] * len(kernel)
            totals = [dilation * (size - 1) for size, dilation in zip(kernel, dilations, strict=True)]
            less, more = [total // 2 for total in totals], [total - total // 2 for total in totals]
            values["pads"] = [*less, *more] if mode == b"SAME_UPPER" else [*more, *less]
        del node.attribute[:]
        node.attribute.extend(helper.make_attribute(name, value) for name, value in values.items())
