"""BatchNorm's running statistics on a device: outputs of the training model that say what they become.

ONNX Runtime's training leaves them as they were exported. The graph knows the new values; here they become further
outputs, which whoever trains puts into the checkpoint after each step. ONNX moves the variance by the batch's own, and
PyTorch by the estimate for what it was drawn from, which is larger by n / (n - 1): the outputs are PyTorch's.
"""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from ortlaunch.export import graph

SUFFIX = ".next"
"""Appended to a parameter's name: the output that it becomes after a step."""


def add_outputs(model: ModelProto) -> dict[str, str]:
    """Adds nodes for the outputs, in place; they are yet to be named as outputs.

    Returns:
        The parameter that each of them becomes.
    """
    statistics = {}
    there = graph.initializers(model)
    for node in list(model.graph.node):
        if node.op_type != "BatchNormalization" or len(node.output) < 3:
            continue
        mean, variance = node.input[3], node.input[4]
        if mean not in there or variance not in there:
            continue
        added = [helper.make_node("Identity", [node.output[1]], [mean + SUFFIX], name=mean + SUFFIX)]
        added += _unbiased(node, variance, int(there[variance].dims[0]), model)
        model.graph.node.extend(added)
        for name in (mean, variance):
            model.graph.value_info.append(
                helper.make_tensor_value_info(name + SUFFIX, TensorProto.FLOAT, list(there[name].dims))
            )
            statistics[name + SUFFIX] = name
    return statistics


def _unbiased(node: NodeProto, variance: str, channels: int, model: ModelProto) -> list[NodeProto]:
    """``kept + (moved - kept) * n / (n - 1)`` where `kept` is the momentum's share of the old variance."""
    momentum = graph.attribute(node, "momentum", 0.9)

    def name(part: str) -> str:
        return f"{variance}.{part}"

    constants = {"momentum": np.float32(momentum), "channels": np.int64(channels), "one": np.float32(1.0)}
    model.graph.initializer.extend(numpy_helper.from_array(value, name(key)) for key, value in constants.items())
    steps = [
        ("Size", [node.input[0]], name("size")),
        ("Div", [name("size"), name("channels")], name("count")),
        ("Cast", [name("count")], name("n")),
        ("Sub", [name("n"), name("one")], name("less")),
        ("Div", [name("n"), name("less")], name("factor")),
        ("Mul", [variance, name("momentum")], name("kept")),
        ("Sub", [node.output[2], name("kept")], name("moved")),
        ("Mul", [name("moved"), name("factor")], name("scaled")),
        ("Add", [name("kept"), name("scaled")], variance + SUFFIX),
    ]
    made = [helper.make_node(kind, inputs, [output], name=output) for kind, inputs, output in steps]
    made[2].attribute.append(helper.make_attribute("to", TensorProto.FLOAT))
    return made


def forget_outputs(model: ModelProto, statistics: dict[str, str]) -> None:
    """Takes the outputs out of an eval model, in place, and with them all that only they needed.

    In eval mode a BatchNormalization must have one output, and moves nothing.
    """
    kept = [one for one in model.graph.output if one.name not in statistics]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    _drop_unread(model)
    for node in model.graph.node:
        if node.op_type == "BatchNormalization" and not graph.attribute(node, "training_mode", 0):
            del node.output[1:]


def _drop_unread(model: ModelProto) -> None:
    outputs = {one.name for one in model.graph.output}
    while True:
        read = outputs | {name for node in graph.nodes(model) for name in node.input}
        kept = [node for node in model.graph.node if any(name in read for name in node.output)]
        if len(kept) == len(model.graph.node):
            return
        # Taken first: what a message holds is gone once it is cleared.
        copies = [NodeProto.FromString(node.SerializeToString()) for node in kept]
        del model.graph.node[:]
        model.graph.node.extend(copies)
