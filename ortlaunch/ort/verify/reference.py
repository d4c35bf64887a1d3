"""PyTorch as the reference of a comparison: dropout is off while everything else stays in train mode."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ortlaunch.ort.source import SourceLine, asking_place
from ortlaunch.ort.tracing.rates import DROPOUT, RECURRENT, rates_of

_TO_PYTHON = {"__bool__", "__int__", "__float__", "__index__", "item", "tolist", "equal", "allclose", "is_nonzero"}
_TO_PYTHON |= {"__array__", "numpy"}


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
        if name in DROPOUT:
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
        elif name in RECURRENT:
            args = tuple(0.0 if isinstance(arg, float) else arg for arg in args)
        result = func(*args, **kwargs)
        if name in _TO_PYTHON:
            self.decisions[asking_place()].append(repr(result))
        return result
