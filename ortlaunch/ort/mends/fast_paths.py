"""Switches off the fused inference operators of ``torch.nn``'s transformer layers, which cannot be exported.

In eval mode without gradients ``TransformerEncoderLayer`` and ``MultiheadAttention`` call an operator of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.backends import mha


@contextlib.contextmanager
def off() -> Iterator[None]:
    """Makes these layers compute step by step until its end."""
    enabled = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        mha.set_fastpath_enabled(enabled)
