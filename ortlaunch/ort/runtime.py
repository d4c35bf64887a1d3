"""Runs an ONNX file in ONNX Runtime, with the settings that its users will have."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

from ortlaunch.ort.quiet import onnxruntime

_ERRORS_ALONE = 3


class Graph:
    """An ONNX model on the CPU with ONNX Runtime's defaults."""

    def __init__(
        self,
        model: Path | bytes,
        *,
        threads: int | None = None,
        weights: Mapping[str, numpy.ndarray[Any, Any]] | None = None,
    ) -> None:
        """
        Args:
            model: the file, or its content if it has no external data.
            threads: number of threads; None takes torch's.
            weights: values by name that replace those in the external data.
        """
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _ERRORS_ALONE
        options.intra_op_num_threads = threads or torch.get_num_threads()
        if weights:
            values = [
                onnxruntime.OrtValue.ortvalue_from_numpy(numpy.ascontiguousarray(one)) for one in weights.values()
            ]
            options.add_external_initializers(list(weights), values)
        content = model if isinstance(model, bytes) else str(model)
        self._session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        self.inputs = tuple(one.name for one in self._session.get_inputs())
        self.outputs = tuple(one.name for one in self._session.get_outputs())

    def __call__(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the outputs by name; tensors of the batch that are no inputs are ignored."""
        feed = {name: batch[name].detach().numpy() for name in self.inputs}
        values = self._session.run(None, feed)
        tensors = [torch.from_numpy(numpy.asarray(value)) for value in values]
        return dict(zip(self.outputs, tensors, strict=True))


def quantize(path: Path, quantized: Path, *, external: bool) -> None:
    """Writes a file again with 8-bit weights of its matrix products and convolutions.

    Args:
        path: the fp32 file.
        quantized: the file to write.
        external: whether to store the weights as external data.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    # The library recommends a preparation step that constant folding has already done.
    logging.disable(logging.WARNING)
    try:
        # On the CPU, ONNX Runtime's ConvInteger supports only unsigned weights.
        quantize_dynamic(str(path), str(quantized), weight_type=QuantType.QUInt8, use_external_data_format=external)
    finally:
        logging.disable(logging.NOTSET)
