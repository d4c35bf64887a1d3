"""PyTorch as the reference of a comparison: dropout is off while everything else stays in train mode."""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

TORCH_FOLDER = str(Path(torch.__file__).parent)
OUR_FOLDER = str(Path(__file__).parents[1])
"""The folder of code that runs between a model and torch."""
_ORT_FOLDER = str(Path(torch.__file__).parents[1] / "onnxruntime")
"""ORTModule replaces some functions of torch."""
_DROPOUT = {
    *("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "native_dropout"),
    *("alpha_dropout", "alpha_dropout_", "feature_dropout", "feature_dropout_"),
    *("feature_alpha_dropout", "feature_alpha_dropout_"),
}
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
_TO_PYTHON = {"__bool__", "__int__", "__float__", "__index__", "item", "tolist", "equal", "allclose", "is_nonzero"}
_TO_PYTHON |= {"__array__", "numpy"}

SourceLine = tuple[str, int]
"""File and line number."""


class Reference(TorchFunctionMode):
    """Switches dropout off and records the tensor values that Python code reads.

    Switching dropout off by ``eval()`` would switch BatchNorm and the model's own branches with it.

    Attributes:
        decisions: for each file and line, the tensor values that it read, in order.
        dropped: whether any dropout would have been active.
        rates: the rate of each dropout, in order; 0 where none would have been active.
    """

    def __init__(self) -> None:
        super().__init__()
        self.decisions: dict[SourceLine, list[str]] = defaultdict(list)
        self.dropped = False
        self.rates: list[float] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        rates = rates_of(name, args, kwargs)
        self.rates += rates
        self.dropped = self.dropped or any(rates)
        if name in _DROPOUT:
            tensor = args[0] if args else kwargs["input"]
            return (tensor, torch.ones_like(tensor, dtype=torch.bool)) if name == "native_dropout" else tensor
        if name == "scaled_dot_product_attention":
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        elif name == "multi_head_attention_forward":
            # This function's own dropout is called where the mode no longer sees it.
            kwargs["training"] = False
        elif name in _RECURRENT:
            args = tuple(0.0 if isinstance(arg, float) else arg for arg in args)
        result = func(*args, **kwargs)
        if name in _TO_PYTHON:
            self.decisions[asking_place()].append(repr(result))
        return result


class NotesRates(TorchFunctionMode):
    """Notes the rates of dropout.

    Attributes:
        rates: as those of `Reference`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.rates += rates_of(getattr(func, "__name__", ""), args, kwargs or {})
        return func(*args, **(kwargs or {}))


def rates_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float]:
    """Returns the rate with which a call of torch drops out: 0 if it does not; nothing for other functions."""
    is_active: Any = True
    if name in _DROPOUT:
        rate = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        is_active = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
    elif name == "scaled_dot_product_attention":
        rate = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    elif name == "multi_head_attention_forward":
        rate = args[10] if len(args) > 10 else kwargs.get("dropout_p", 0.0)
        is_active = kwargs.get("training", True)
    elif name in _RECURRENT:
        # The rate is the only float among the arguments.
        return [float(arg) for arg in args if isinstance(arg, float)]
    else:
        return []
    return [float(rate) if is_active else 0.0]


def asking_place() -> SourceLine:
    """Returns the line of the model that called torch: the innermost frame outside torch and this package."""
    frame: FrameType | None = sys._getframe(1)
    between = (TORCH_FOLDER, OUR_FOLDER, _ORT_FOLDER, warnings.__file__)
    while frame is not None and frame.f_code.co_filename.startswith(between):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)
