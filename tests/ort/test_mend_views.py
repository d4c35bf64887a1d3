"""Changes in place of memory that several tensors share: as in PyTorch, or refused with their line."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ortlaunch.errors import RequestError
from tests.ort.precise import Case, assert_as_in_fp64

Wrap = Callable[..., nn.Module]
SHAPE = (6, 4)


def through_a_view(h: Tensor) -> Tensor:
    y = h.view(-1, 2)
    y.mul_(2)
    return h.sin() + y.cos().view_as(h)


def through_a_kept_slice(h: Tensor) -> Tensor:
    part = h[:, 1:3]
    part.mul_(0.3)
    return h.sin()


def through_an_open_slice(h: Tensor) -> Tensor:
    last = h[:, -2:]
    last.add_(h[:, :2])
    return h.sin()


def through_every_second(h: Tensor) -> Tensor:
    second = h[:, ::2]
    second.exp_()
    return h.sin()


def through_an_element(h: Tensor) -> Tensor:
    last = h[:, -1]
    last += 1
    return h.sin() + last[:, None]


def through_several(h: Tensor) -> Tensor:
    turned = h.transpose(1, 2)
    row = turned[:, 1].unsqueeze(1)
    row.mul_(3.0)
    return h.sin() + turned.cos().permute(0, 2, 1)


def through_a_permutation(h: Tensor) -> Tensor:
    y = h.permute(2, 0, 1)
    y[1].mul_(3.0)
    return h.sin() + y.permute(1, 2, 0)


def the_whole_under_a_view(h: Tensor) -> Tensor:
    y = h.flatten(1)
    h.mul_(2)
    return y.sin().view_as(h)


# Parts of a split may be changed only where they need no gradient.
def part_of_a_split(h: Tensor) -> Tensor:
    table = torch.ones(h.size(0), 6, 4, dtype=h.dtype)
    left, right = table.chunk(2, dim=-1)
    left.mul_(3)
    right.add_(left)
    return h * table.sin()


def part_of_an_unbinding(h: Tensor) -> Tensor:
    table = torch.ones(h.size(0), 6, 4, dtype=h.dtype)
    rows = table.unbind(1)
    for before, row in itertools.pairwise(rows):
        row.add_(before, alpha=0.5)
    return h * table.sin()


def part_of_unequal_parts(h: Tensor) -> Tensor:
    table = torch.ones_like(h).detach()
    _, middle, _ = table.split([1, 3, 2], 1)
    middle.zero_()
    return (h * table).sin() + middle.mean()


def the_diagonal(h: Tensor) -> Tensor:
    square = h[:, :4].clone()
    square.diagonal(dim1=1, dim2=2).add_(h[:, 5])
    return square.sin()


def filled_by_a_mask(h: Tensor) -> Tensor:
    y = h.view(h.size(0), -1)
    y.masked_fill_(y > 0.5, 0.5)
    return h.sin()


def filled(h: Tensor) -> Tensor:
    y = h.view(-1)
    part = h[:, 2:4]
    part.fill_(0.25)
    return y.sin() + h.cos().view(-1)


def copied_into(h: Tensor) -> Tensor:
    kept = h.narrow(1, 1, 2)
    kept.copy_(h[:, 4:] * 2)
    return h.sin() + kept.sum()


def several_times(h: Tensor) -> Tensor:
    y = h.view(h.size(0), 4, 6)
    y[:, 0].mul_(2)
    h[:, 1] += y[:, 3, :4]
    y.add_(1)
    return h.sin() * y.cos().view_as(h)


def assigned(h: Tensor) -> Tensor:
    before = h[:, 0]
    h[:, 0] = h[:, 1] * 2
    return h.sin() + before[:, None]


def assigned_with_steps(h: Tensor) -> Tensor:
    h[:, :, ::2] *= 0.5
    return h.sin()


def of_another_type(h: Tensor) -> Tensor:
    mask = torch.zeros(h.size(0), 6, dtype=torch.bool)
    first = mask[:, :3]
    first.copy_(h[:, :3, 0] > 0)
    counts = torch.zeros(6, dtype=torch.long)
    counts.view(2, 3)[0].add_(2)
    return h * mask[..., None] * counts[None, :, None]


def of_another_memory(h: Tensor) -> Tensor:
    table = torch.zeros(h.size(0), 6, 4, dtype=h.dtype)
    rows = table.view(-1, 4)
    rows.add_(h.reshape(-1, 4))
    copy = h.transpose(1, 2).reshape(h.size(0), -1)
    copy.mul_(5)
    return table.sin() + h


def detached(h: Tensor) -> Tensor:
    before = h * 2
    y = h.detach()
    y.mul_(2)
    y[:, 0].clamp_(min=0)
    return h.sin() + before


def broadcast_into(h: Tensor) -> Tensor:
    y = torch.zeros_like(h)
    y.copy_(h[:, :1])
    return h.sin() + y


def broadcast_into_a_part(h: Tensor) -> Tensor:
    y = h.clone()
    y[:, 1:3].copy_(h[:, :1] * 2)
    return y.sin()


CASES = {
    function.__name__: Case(lambda h, function=function: function(h.clone()), [SHAPE])
    for function in (
        *(through_a_view, through_a_kept_slice, through_an_open_slice, through_every_second),
        *(through_an_element, through_several, through_a_permutation, the_whole_under_a_view, part_of_a_split),
        *(part_of_an_unbinding, part_of_unequal_parts, the_diagonal, filled_by_a_mask, filled, copied_into),
        *(several_times, assigned, assigned_with_steps, of_another_memory, of_another_type, detached),
        *(broadcast_into, broadcast_into_a_part),
    )
}


def test_they_are_exported(to_ort: Wrap) -> None:
    assert_as_in_fp64(to_ort, CASES)


def expanded(h: Tensor) -> Tensor:
    y = h[:, :1].expand(-1, 1, 4)
    y.mul_(2)  # changed
    return h.sin()


@pytest.mark.parametrize("function", [expanded])
def test_what_a_graph_cannot_repeat_is_refused_with_its_line(
    to_ort: Wrap, function: Callable[[Tensor], Tensor]
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return function(x * self.weight)

    lines = Path(__file__).read_text().splitlines()
    start = next(number for number, text in enumerate(lines, 1) if text.startswith(f"def {function.__name__}("))
    line = next(number for number, text in enumerate(lines, 1) if number > start and text.endswith("# changed"))
    with pytest.raises(RequestError, match=rf"`y\.\w+_\(2?\).*` at .*{re.escape(Path(__file__).name)}:{line} changes"):
        to_ort(Net())(torch.randn(2, *SHAPE))
