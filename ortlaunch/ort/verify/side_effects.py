"""Finds what a model's forward changes beside its outputs and buffers: parameters, and values of its Python code.

ONNX Runtime's graph has neither. Parameters that forward limits or rescales would stay as the optimizer leaves them. A
counter by which a loss is weighted would keep the value that it had when the graph was traced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ortlaunch.ort.cache import key
from ortlaunch.ort.cache.reachable_code import NotCacheableError
from ortlaunch.ort.verify.reference import SourceLine, asking_place


@dataclass(frozen=True)
class Write:
    """A parameter that forward changes in place."""

    parameter: str
    operator: str
    place: SourceLine


@dataclass(frozen=True)
class PythonChange:
    """A value that each forward changes."""

    where: str
    before: str
    after: str


class ParameterWrites(TorchDispatchMode):
    """Notes operators that write into a parameter, also through ``.data``, under ``no_grad`` and through views.

    Attributes:
        found: by name of the parameter, the first such operator.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        # Parameters of DeepSpeed may share a storage. Then the first one's name stands for all.
        self._names: dict[int, str] = {}
        for name, parameter in model.named_parameters():
            if parameter.numel():
                self._names.setdefault(parameter.untyped_storage().data_ptr(), name)
        self.found: dict[str, Write] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                self._note(func, argument, value)
            for argument in func._schema.arguments:
                if argument.name in kwargs:
                    self._note(func, argument, kwargs[argument.name])
        return func(*args, **kwargs)

    def _note(self, func: Any, argument: Any, value: Any) -> None:
        if argument.alias_info is None or not argument.alias_info.is_write:
            return
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if isinstance(tensor, torch.Tensor):
                name = self._names.get(tensor.untyped_storage().data_ptr())
                if name is not None:
                    operator = func._schema.name.removeprefix("aten::")
                    self.found.setdefault(name, Write(name, operator, asking_place()))


def python_change(model: torch.nn.Module, forward: Callable[[], object]) -> PythonChange | None:
    """Returns a value of the model's Python code that changes with each forward; None where there is none.

    What only the first forward changes, such as a table that it makes once, does not count.

    Args:
        model: the plain model.
        forward: runs it; with the same batch and the same random numbers each time.
    """
    forward()
    first = _facts(model)
    forward()
    second = _facts(model)
    return _difference("", first, second)


def _facts(model: torch.nn.Module) -> dict[str, Any]:
    """Describes all that forward's code reaches; where that has no description, the modules' plain attributes."""
    try:
        facts = key.model_facts(model)
        return {"modules": facts["modules"], "reached": facts["reached"]}
    except NotCacheableError:
        plain = (bool, int, float, str)
        return {
            "modules": {
                name: {attribute: repr(value) for attribute, value in vars(module).items() if isinstance(value, plain)}
                for name, module in model.named_modules()
            }
        }


def _difference(where: str, before: Any, after: Any) -> PythonChange | None:
    if not key.changed(before, after):
        return None
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        pairs = [(f"{where}.{name}", before[name], after[name]) for name in before]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = [(where, *pair) for pair in zip(before, after, strict=True)]
    else:
        return PythonChange(_name(where), _value(before), _value(after))
    return next((found for found in (_difference(*pair) for pair in pairs) if found is not None), None)


def _name(where: str) -> str:
    return where.removeprefix(".modules").removeprefix(".reached").lstrip(".") or "the model"


def _value(described: Any) -> str:
    text = str(described)
    return text if len(text) <= 40 else f"{text[:37]}..."
