"""Moves the weights that a run trains, and back to the bit.

A weight whose value became a constant of the graph shows only in a comparison from another value than that of the
trace. Bits are turned round in place, which needs no copy of the weights; a second turn is the way back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

_SHARES = (2.0**-3, 2.0**-2)
"""By how much of itself a weight is moved at most, in turns: all by the same share would not show behind a
normalization. What is rounded, or compared with a bound, shows only where some weights move far."""
_OF_ZERO = (2.0**-6, 2.0**-5)
"""What a zero becomes."""
_INTEGERS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
_PART = 1 << 18
"""Elements that are moved at once."""


@contextlib.contextmanager
def moved_weights(model: torch.nn.Module) -> Iterator[None]:
    """Moves each trained weight meanwhile, most by a tenth of itself, zeros by some hundredths.

    Frozen weights stay: a graph may hold their values.
    """
    _turn(model)
    try:
        yield
    finally:
        _turn(model)


def _turn(model: torch.nn.Module) -> None:
    for weight in model.parameters():
        if weight.requires_grad and weight.dtype in _INTEGERS and weight.numel():
            rows = torch.atleast_1d(weight.data.view(_INTEGERS[weight.dtype]))
            for part in rows.split(max(1, _PART * len(rows) // rows.numel())):
                part ^= _turned(part, weight.dtype)


def _turned(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the bits that change; they are the same on the way back."""
    turns = torch.arange(bits.shape[-1], device=bits.device) % len(_SHARES)
    share, of_zero = (torch.tensor(one, dtype=dtype, device=bits.device) for one in (_SHARES, _OF_ZERO))
    # In the fraction, this is the bit that stands for the share.
    bit = (share / torch.finfo(dtype).eps).to(bits.dtype)[turns]
    partner = of_zero.view(bits.dtype)[turns]
    rest = bits & (torch.iinfo(bits.dtype).max & ~bit)
    is_special = (rest == 0) | (rest == partner)
    if not is_special.any():
        return bit
    # Zero and its partner change places, and what would change places with them stays.
    return torch.where(is_special, torch.where(bits & bit == 0, partner, 0), bit)
