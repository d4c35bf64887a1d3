"""Finds the shape of every tensor in a graph by running it; ONNX Runtime builds its gradients from the shapes.

Where shape inference does not understand the exported graph, ONNX Runtime treats two unknown sizes as equal and omits
the sum over the broadcast dimension. The gradient of BERT's position embeddings would then be that of one sample,
without an error.
"""

from __future__ import annotations

from pathlib import Path

import torch
from onnx import ModelProto, ValueInfoProto, helper

from ortlaunch.export.external_data import runnable
from ortlaunch.export.forward import Forward, shorter
from ortlaunch.models.task import Batch

_KNOWN = {"batch": 0, "sequence": 1}


def note_shapes(model: ModelProto, forward: Forward, batch: Batch, folder: Path) -> None:
    """Adds the shape of every tensor to a graph, in place.

    Args:
        model: the forward graph, in memory.
        forward: how the model is called.
        batch: the batch to run it with: unchanged, with fewer samples, and with shorter sequences.
        folder: the folder of the external data, if any.
    """
    outputs = {one.name for one in model.graph.output}
    names = [name for node in model.graph.node if node.op_type != "Constant" for name in node.output]
    inner = [name for name in names if name and name not in outputs]
    copied = ModelProto()
    copied.CopyFrom(model)
    copied.graph.output.extend(ValueInfoProto(name=name) for name in inner)
    run = runnable(copied, folder)
    trials = [batch, shorter(batch, 0), shorter(batch, 1)]
    seen = [run(forward.feed(one)) for one in trials]
    main = forward.inputs[0]
    sizes = {
        tuple(one[main].shape[dim] for one in trials): name
        for name, dim in _KNOWN.items()
        if name in forward.axes[main].values()
    }
    infos = [
        helper.make_tensor_value_info(name, _element_type(seen[0][name]), _dims([one[name] for one in seen], sizes))
        for name in inner
        if len({one[name].dim() for one in seen}) == 1
    ]
    del model.graph.value_info[:]
    model.graph.value_info.extend(infos)


def _element_type(tensor: torch.Tensor) -> int:
    return int(helper.np_dtype_to_tensor_dtype(tensor.numpy().dtype))


def _dims(seen: list[torch.Tensor], sizes: dict[tuple[int, ...], str]) -> list[int | str]:
    """Returns constant sizes as numbers; sizes that vary together get the same name."""
    dims: list[int | str] = []
    for values in zip(*(tensor.shape for tensor in seen), strict=True):
        if len(set(values)) == 1:
            dims.append(int(values[0]))
        else:
            dims.append(sizes.get(values, "size_" + "_".join(map(str, values))))
    return dims
