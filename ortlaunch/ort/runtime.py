"""Running an ONNX file in ONNX Runtime, as whoever gets the file would."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

from ortlaunch.ort.quiet import onnxruntime
from ortlaunch.ort.verify.nested import NamedTensors

_ERRORS_ALONE = 3


class Graph:
    """A file, ready to run on the CPU with the runtime's own defaults."""

    def __init__(
        self,
        model: Path | bytes,
        *,
        threads: int | None = None,
        weights: Mapping[str, numpy.ndarray[Any, Any]] | None = None,
    ) -> None:
        """
        Args:
            model: the file, or its contents where no weights lie beside it.
            threads: of its pool; None for torch's own.
            weights: by name, to run it with instead of those that lie beside the file.
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

    def __call__(self, batch: Mapping[str, torch.Tensor]) -> NamedTensors:
        """The outputs by name for a batch, of which it takes what it has inputs for."""
        feed = {name: batch[name].detach().numpy() for name in self.inputs}
        values = self._session.run(None, feed)
        tensors = [torch.from_numpy(numpy.asarray(value)) for value in values]
        return dict(zip(self.outputs, tensors, strict=True))


def quantize(path: Path, quantized: Path, *, external: bool) -> None:
    """Writes a file again with the weights of its matrix products and convolutions in 8 bits.

    Args:
        path: the file in fp32.
        quantized: where to.
        external: whether weights come to lie in a file beside it.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    # It recommends a preparation that folding has made already.
    logging.disable(logging.WARNING)
    try:
        # ONNX Runtime's ConvInteger takes unsigned weights alone on the CPU.
        quantize_dynamic(str(path), str(quantized), weight_type=QuantType.QUInt8, use_external_data_format=external)
    finally:
        logging.disable(logging.NOTSET)
