"""Parts of a tensor, such as query, key and value, that are also used elsewhere, or not at all, or without gradient."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.support.nightly import first_in_ci

HEADS = 2
USES = ("none", "output", "residual", "after", "detached", "compared", "shape")
"""What else becomes of a part."""


@dataclass
class Draw:
    packed: bool
    """Whether query, key and value are parts of one projection."""
    uses: tuple[str, str, str]
    option: int

    def __str__(self) -> str:
        return "-".join(["packed" if self.packed else "apart", *self.uses])


def draws(count: int, seed: int) -> list[Draw]:
    generator = random.Random(seed)
    found = []
    for index in range(count):
        first, second = generator.choices(USES, k=2)
        uses = [USES[index % len(USES)], first, second]
        generator.shuffle(uses)
        found.append(Draw(generator.random() < 0.7, tuple(uses), generator.randrange(3)))
    return found


DRAWS = draws(18, seed=3)


class Attention(torch.nn.Module):
    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.draw = draw
        self.together = torch.nn.Linear(8, 24)
        self.apart = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        for layer in [*self.apart] if draw.packed else [self.together]:
            layer.requires_grad_(False)
        self.last = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch, length, _ = x.shape
        parts = self.together(x).split(8, dim=2) if self.draw.packed else [layer(x) for layer in self.apart]
        used = [part.detach() if use == "detached" else part for part, use in zip(parts, self.draw.uses, strict=True)]
        query, key, value = (part.view(batch, length, HEADS, 4).transpose(1, 2) for part in used)
        mask = torch.ones(length, length, dtype=torch.bool).tril() if self.draw.option == 1 else None
        mixed = functional.scaled_dot_product_attention(query, key, value, mask, is_causal=self.draw.option == 2)
        result = self.last(mixed.transpose(1, 2).reshape(batch, length, 8))
        outputs = []
        for part, turned, use in zip(parts, (query, key, value), self.draw.uses, strict=True):
            match use:
                case "output":
                    outputs.append(turned)
                case "residual":
                    result = result + part
                case "after":
                    outputs.append((turned * mixed).sum(-1))
                case "compared":
                    result = torch.where(part > 0, result, result * 0.5)
                case "shape":
                    result = result * part.shape[1]
        return result, *outputs


@pytest.mark.parametrize(
    "index", first_in_ci(range(len(DRAWS)), 6), ids=[f"{index}-{draw}" for index, draw in enumerate(DRAWS)]
)
def test_query_key_and_value_may_be_used_elsewhere(assert_parity: Any, index: int) -> None:
    torch.manual_seed(index)
    model = Attention(DRAWS[index])
    assert_parity(model, {"x": torch.randn(2, 5, 8)}, {"x": torch.randn(3, 7, 8)}, tolerance=5e-6)


CUTS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "chunk": lambda x: x.chunk(3, -1),
    "split": lambda x: x.split([2, 4, 6], -1),
    "rows": lambda x: x.split([1, 1, 2], 0),
    "unbind": lambda x: x.view(4, 3, 4).unbind(1),
    "slices": lambda x: (x[:, :4], x[:, 4:6], x[:, 6:]),
}
PARTS: dict[str, Callable[..., torch.Tensor]] = {
    "first": lambda first, *_: first * 2,
    "first and last": lambda first, _, last: first.sum() * last,
    "detached": lambda first, second, last: first * second.detach().sum() + last.sum().detach(),
    "compared": lambda first, second, last: torch.where(second.sum() > 0, first, first * last.sum()),
    "all": lambda first, second, last: first * second.sum() * last.sum(),
}


class Cut(torch.nn.Module):
    def __init__(self, cut: str, parts: str) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 12)
        self.cut, self.parts = CUTS[cut], PARTS[parts]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts(*self.cut(self.layer(x)))


@pytest.mark.parametrize("torch_kernels", [True, False], ids=["torch_kernels", "ort_kernels"])
@pytest.mark.parametrize(
    ("cut", "parts"),
    [
        *(("chunk", "first"), ("chunk", "detached"), ("split", "compared"), ("rows", "first and last")),
        *(("unbind", "first"), ("split", "all"), ("rows", "detached")),
        *(("slices", "detached"), ("slices", "compared")),
    ],
)
def test_parts_without_a_gradient(assert_parity: Any, cut: str, parts: str) -> None:
    torch.manual_seed(1)
    assert_parity(Cut(cut, parts), {"x": torch.randn(4, 8)}, tolerance=5e-6)
