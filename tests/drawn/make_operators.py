"""Writes ``operators.jsonl``: calls of torch's differentiable operators on small tensors, from torch's own test lists.

Run as ``python -m tests.drawn.make_operators``. The calls are kept in a file, because importing torch's lists takes
seconds, changes settings of the process, and differs between releases: a drawn model is to depend on its seed alone.
"""

from __future__ import annotations

import json
import random
import sys
import types
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.drawn.operators import TABLE, Call
from tests.drawn.piece import BATCH, LENGTH, WIDTH

_MOST_VALUES, _MOST_INTEGERS, _MOST_SAMPLES, _MOST_CALLS = 125, 36, 12, 4
_LARGEST = 50.0
"""Operators whose values or gradients exceed this are left out: five steps of training would not stay finite."""


def _op_db() -> list[Any]:
    if "expecttest" not in sys.modules:
        # torch's lists are beside the base class of its tests, which needs this package and is not used here.
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        stand_in.ACCEPT = False  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


class _Cannot(Exception):
    """The sample cannot be written as a line of source."""


class _Written:
    """The arguments of a sample as source, and the tensors among them."""

    def __init__(self) -> None:
        self.floats: dict[str, Any] = {}
        self.integers: dict[str, Any] = {}

    def argument(self, value: Any) -> str:
        """The value as source; a tensor becomes a name."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (list, tuple)):
            inside = ", ".join(self.argument(item) for item in value)
            if isinstance(value, list):
                return f"[{inside}]"
            return f"({inside},)" if len(value) == 1 else f"({inside})"
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        if isinstance(value, float):
            return f"float('{value}')" if value != value or abs(value) == float("inf") else repr(value)
        if isinstance(value, torch.dtype):
            return str(value)
        raise _Cannot

    def _tensor(self, tensor: torch.Tensor) -> str:
        name = "abcdefgh"[len(self.floats) + len(self.integers) :][:1]
        if not name or tensor.layout is not torch.strided or tensor.numel() > _MOST_VALUES or tensor.numel() == 0:
            raise _Cannot
        if tensor.dtype is torch.float32:
            low, high = float(tensor.detach().min()), float(tensor.detach().max())
            if not (abs(low) < 1e3 and abs(high) < 1e3):
                raise _Cannot
            self.floats[name] = [
                list(tensor.shape),
                round(low, 2),
                round(max(high, low + 0.1), 2),
                tensor.requires_grad,
            ]
        elif tensor.dtype in (torch.int64, torch.int32, torch.bool) and tensor.numel() <= _MOST_INTEGERS:
            self.integers[name] = [tensor.tolist(), str(tensor.dtype)]
        else:
            raise _Cannot
        return name + "#"


def _forms(name: str) -> Iterator[str]:
    """How the operator can be called: as a function, a method, in place."""
    path = name.removeprefix("nn.functional.")
    owner: Any = torch.nn.functional if path != name else torch
    for part in path.split("."):
        owner = getattr(owner, part, None)
    if callable(owner):
        yield f"F.{path}({{all}})" if path != name else f"torch.{path}({{all}})"
    if callable(getattr(torch.Tensor, name, None)):
        yield f"{{first}}.{name}({{rest}})"
    if not name.startswith("__") and callable(getattr(torch.Tensor, f"{name}_", None)):
        yield f"{{first}}.{name}_({{rest}})"


def _calls(info: Any) -> Iterator[Call]:
    """Calls of an operator that eager PyTorch computes and differentiates with small numbers."""
    found: dict[str, Call] = {}
    forms = list(_forms(info.name))
    torch.manual_seed(0)
    random.seed(0)
    samples = info.sample_inputs("cpu", torch.float32, requires_grad=True)
    for index in range(_MOST_SAMPLES):
        try:
            sample = next(samples)
        except StopIteration:
            break
        for form in forms if index == 0 else forms[index % len(forms) :][:1]:
            call = _call(info.name, form, sample)
            if call is not None and call.text not in found and _works(call):
                found[call.text] = call
    yield from list(found.values())[:_MOST_CALLS]


def _call(name: str, form: str, sample: Any) -> Call | None:
    written = _Written()
    try:
        first = written.argument(sample.input)
        rest = [written.argument(value) for value in sample.args]
        rest += [f"{key}={written.argument(value)}" for key, value in sample.kwargs.items()]
    except _Cannot:
        return None
    if not any(wanted for *_, wanted in written.floats.values()):
        return None
    text = form.format(first=first, rest=", ".join(rest), all=", ".join([first, *rest]))
    return Call(name, text, written.floats, written.integers, [])


def _works(call: Call) -> bool:
    """Whether eager PyTorch computes the call alike in fp32 and fp64; notes the shapes of its outputs."""
    results = []
    try:
        for dtype in (torch.float32, torch.float32, torch.float64):
            results.append(_results(call, dtype))
    except Exception:
        return False
    for single, again, double in zip(*results, strict=True):
        bad = not torch.isfinite(double).all() or double.abs().max() > _LARGEST or not torch.equal(single, again)
        if bad or (single.double() - double).abs().max() > 1e-4 * double.abs().max().clamp_min(1.0):
            return False
    return True


def _results(call: Call, dtype: torch.dtype) -> list[torch.Tensor]:
    """The outputs and the gradients of the call in a drawn model."""
    torch.manual_seed(1)
    h = torch.randn(BATCH, LENGTH, WIDTH).to(dtype)
    names: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "h": h}
    leaves = []
    for name, (shape, low, high, wanted) in call.floats.items():
        leaf = torch.empty(shape).uniform_(low, high).to(dtype).requires_grad_(wanted)
        names[name] = leaf * (1 + 0.1 * h.flatten()[: leaf.numel()].view(leaf.shape).tanh()) if wanted else leaf
        leaves += [leaf] if wanted else []
    names |= {name: torch.tensor(values) for name, (values, _) in call.integers.items()}
    given = eval(call.text.replace("#", "").replace("torch.float32", str(dtype)), names)
    outputs = list(given) if isinstance(given, (tuple, list)) else [given]
    call.outputs[:] = [list(one.shape) if one.dtype is dtype else None for one in outputs]
    outputs = [one for one in outputs if one.dtype is dtype]
    if not outputs or any(one.numel() == 0 or one.numel() > 2 * _MOST_VALUES for one in outputs):
        raise _Cannot
    total = sum((one * torch.linspace(-1, 1, one.numel(), dtype=dtype).view(one.shape)).sum() for one in outputs)
    gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    return [one.detach() for one in (*outputs, *gradients) if one is not None]


def main() -> None:
    """Writes the table."""
    lines = []
    for info in _op_db():
        if not info.supports_autograd or torch.float32 not in info.dtypes or info.name.startswith("_"):
            continue
        try:
            lines += [json.dumps(call.__dict__) for call in _calls(info)]
        except Exception as error:
            print(f"{info.name}: {type(error).__name__}", file=sys.stderr)
    Path(TABLE).write_text("\n".join(dict.fromkeys(lines)) + "\n")
    print(f"{len(lines)} calls")


if __name__ == "__main__":
    main()
