"""Computes BatchNorm's running statistics on a device: further outputs of the training model hold their new values.

ONNX Runtime's training overwrites the statistics in place, in an undefined order and with the variance of the batch.
PyTorch uses the unbiased estimate instead, which is larger by n / (n - 1). So here BatchNorm gets dummy statistics and
returns those of the batch, and further outputs of the graph compute PyTorch's values from them. The training program
copies these outputs into the checkpoint after each step.
"""

from __future__ import annotations

from onnx import ModelProto, NodeProto, TensorProto, helper

from ortlaunch.export import graph

SUFFIX = ".next"
"""Suffix of the output that holds the new value of a parameter after a step."""
_NONE = ".none"
"""Suffix of the dummy that BatchNorm reads in place of the parameter in the training model."""


def add_outputs(model: ModelProto) -> dict[str, str]:
    """Adds the nodes that compute the outputs, in place; the caller still has to declare the outputs.

    Returns:
        The parameter that each output belongs to.
    """
    statistics = {}
    there = graph.initializers(model)
    for node in list(model.graph.node):
        if node.op_type != "BatchNormalization" or len(node.output) < 3:
            continue
        mean, variance = node.input[3], node.input[4]
        if mean not in there or variance not in there:
            continue
        channels = int(there[mean].dims[0])
        kept = graph.attribute(node, "momentum", 0.9)
        for position, name in ((3, mean), (4, variance)):
            # The dummy is computed: ONNX Runtime would share equal constants and overwrite them in place.
            model.graph.initializer.append(graph.constant(0.0, f"{name}.zero"))
            made = helper.make_node("Mul", [name, f"{name}.zero"], [name + _NONE], name=name + _NONE)
            model.graph.node.insert(list(model.graph.node).index(node), made)
            node.input[position] = name + _NONE
            statistics[name + SUFFIX] = name
            info = helper.make_tensor_value_info(name + SUFFIX, TensorProto.FLOAT, [channels])
            model.graph.value_info.append(info)
        _set_momentum(node, 0.0)
        factor = _bessel(node, variance, channels, model)
        model.graph.node.extend(_mixed(mean, node.output[1], kept, None, model))
        model.graph.node.extend([*factor, *_mixed(variance, node.output[2], kept, f"{variance}.factor", model)])
    return statistics


def _set_momentum(node: NodeProto, value: float) -> None:
    kept = [one for one in node.attribute if one.name != "momentum"]
    attributes = [*kept, helper.make_attribute("momentum", value)]
    copies = [type(one).FromString(one.SerializeToString()) for one in attributes]
    del node.attribute[:]
    node.attribute.extend(copies)


def _mixed(name: str, batch: str, kept: float, factor: str | None, model: ModelProto) -> list[NodeProto]:
    """``name * kept + batch * factor * (1 - kept)``."""
    for part, value in (("old_share", kept), ("new_share", 1.0 - kept)):
        model.graph.initializer.append(graph.constant(value, f"{name}.{part}"))
    steps = [("Mul", [batch, factor], f"{name}.scaled")] if factor else []
    steps += [
        ("Mul", [name, f"{name}.old_share"], f"{name}.old"),
        ("Mul", [f"{name}.scaled" if factor else batch, f"{name}.new_share"], f"{name}.new"),
        ("Add", [f"{name}.old", f"{name}.new"], name + SUFFIX),
    ]
    return [helper.make_node(kind, inputs, [output], name=output) for kind, inputs, output in steps]


def _bessel(node: NodeProto, name: str, channels: int, model: ModelProto) -> list[NodeProto]:
    """``n / (n - 1)`` for n values of each channel."""
    model.graph.initializer.append(graph.constant(channels, f"{name}.channels", "int64"))
    model.graph.initializer.append(graph.constant(1.0, f"{name}.one"))
    steps = [
        ("Size", [node.input[0]], f"{name}.size"),
        ("Div", [f"{name}.size", f"{name}.channels"], f"{name}.count"),
        ("Cast", [f"{name}.count"], f"{name}.n"),
        ("Sub", [f"{name}.n", f"{name}.one"], f"{name}.less"),
        ("Div", [f"{name}.n", f"{name}.less"], f"{name}.factor"),
    ]
    made = [helper.make_node(kind, inputs, [output], name=output) for kind, inputs, output in steps]
    made[2].attribute.append(helper.make_attribute("to", TensorProto.FLOAT))
    return made


def forget_outputs(model: ModelProto, statistics: dict[str, str]) -> None:
    """Removes the added outputs from an eval model, in place; BatchNorm then reads the running statistics again.

    In eval mode a BatchNormalization must have one output. ONNX Runtime's own artifacts leave it three, and
    then the file cannot be loaded.
    """
    kept = [one for one in model.graph.output if one.name not in statistics]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    for node in model.graph.node:
        if node.op_type == "BatchNormalization":
            for position in (3, 4):
                node.input[position] = node.input[position].removesuffix(_NONE)
            del node.output[1:]
    _drop_unread(model)


def _drop_unread(model: ModelProto) -> None:
    outputs = {one.name for one in model.graph.output}
    while True:
        read = outputs | {name for node in graph.nodes(model) for name in node.input}
        kept = [node for node in model.graph.node if any(name in read for name in node.output)]
        if len(kept) == len(model.graph.node):
            break
        # The copies are made first, because clearing a message destroys its elements.
        copies = [NodeProto.FromString(node.SerializeToString()) for node in kept]
        del model.graph.node[:]
        model.graph.node.extend(copies)
    constants = [TensorProto.FromString(one.SerializeToString()) for one in model.graph.initializer if one.name in read]
    del model.graph.initializer[:]
    model.graph.initializer.extend(constants)
