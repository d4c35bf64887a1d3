"""Draws calls of torch's operators from the table that `make_operators` wrote from torch's own test lists."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.drawn.piece import WIDTH, Catalogue, Piece, numbered

TABLE = Path(__file__).with_name("operators.jsonl")

_RARE = (
    *(
        "linalg.",
        "fft.",
        "special.",
        "masked.",
        "cholesky",
        "polygamma",
        "mvlgamma",
        "lgamma",
        "digamma",
        "erfinv",
        "lu",
    ),
    *(
        "svd",
        "geqrf",
        "renorm",
        "cdist",
        "pdist",
        "trace",
        "kron",
        "logcumsumexp",
        "cummax",
        "cummin",
        "cumprod",
        "dist",
    ),
    *("copysign", "hypot", "xlogy", "sinc", "deg2rad", "rad2deg", "frexp", "ldexp", "nanmean", "nansum", "nanmedian"),
    *("mode", "kthvalue", "quantile", "nanquantile", "put", "trapz", "trapezoid", "cumulative_trapezoid", "gradient"),
    *(
        "block_diag",
        "combinations",
        "cartesian_prod",
        "diag_embed",
        "diagonal_scatter",
        "select_scatter",
        "slice_scatter",
    ),
    *("as_strided_scatter", "as_strided", "nn.functional.margin_ranking_loss", "nn.functional.multi_margin_loss"),
    *("nn.functional.multilabel", "nn.functional.grid_sample", "nn.functional.ctc_loss", "nn.functional.pdist"),
)
"""Beginnings of the names of operators that networks rarely use."""


@dataclass
class Call:
    """A call of one operator. Names of tensors end with ``#`` in the text."""

    name: str
    text: str
    floats: dict[str, Any]
    """By name: shape, smallest and largest value, and whether it needs a gradient."""
    integers: dict[str, Any]
    """By name: values and dtype."""
    outputs: list[Any]
    """The shape of each output; None for one that is no fp32 tensor."""


@cache
def _calls() -> dict[str, list[Call]]:
    calls: dict[str, list[Call]] = {}
    for line in TABLE.read_text().splitlines():
        call = Call(**json.loads(line))
        calls.setdefault(call.name, []).append(call)
    return calls


OPERATORS = Catalogue()


@OPERATORS.kind()
def operator(chance: random.Random, number: int) -> Piece:
    """A call whose arguments depend on the activations and whose every output value has a weight of its own."""
    names = sorted(_calls())
    weights = [1.0 if name.startswith(_RARE) else 5.0 for name in names]
    calls = _calls()[chance.choices(names, weights)[0]]
    # torch's lists begin with scalars, which few networks compute with.
    shaped = [call for call in calls if any(math.prod(shape) > 1 for shape, *_ in call.floats.values())]
    call = chance.choice(shaped if shaped and chance.random() < 0.9 else calls)
    init, forward = [], []
    for name, (shape, low, high, trained) in call.floats.items():
        values = f"torch.empty({_sizes(shape)}).uniform_({low}, {high})"
        if not trained:
            init.append(f"self.register_buffer('{name}#', {values})")
            forward.append(f"{name}# = self.{name}#")
            continue
        init.append(f"self.{name}# = nn.Parameter({values})")
        activations = f"h.flatten()[:{math.prod(shape)}].view({_sizes(shape)})"
        forward.append(f"{name}# = self.{name}# * (1 + 0.1 * {activations}.tanh())")
    for name, (values, dtype) in call.integers.items():
        forward.append(f"{name}# = torch.tensor({values}, dtype={dtype})")
    results = [f"y{index}#" if shape is not None else "_" for index, shape in enumerate(call.outputs)]
    forward.append(f"{', '.join(results)} = {call.text}")
    for index, shape in enumerate(call.outputs):
        if shape is not None:
            init.append(f"self.mix{index}# = nn.Parameter(torch.rand({_sizes(shape)}) * 0.1)")
            # Each feature gets another share: what all classes get alike, cross-entropy ignores.
            forward.append(f"h = h + (y{index}# * self.mix{index}#).sum() * torch.linspace(-1, 1, {WIDTH})")
    # Under ONNX Runtime it drops other elements than in eager. Other noise is eager's.
    drops = "F.dropout(" in call.text and "p=0.5, training=True" in call.text
    return numbered(Piece(call.name, init=tuple(init), forward=tuple(forward), is_random=drops), number)


def _sizes(shape: list[int]) -> str:
    return ", ".join(map(str, shape)) if shape else "()"
