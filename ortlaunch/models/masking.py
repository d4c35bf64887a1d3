"""Masked language modelling on batches whose labels equal their inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ortlaunch.base.errors import RequestError

IGNORED = -100
"""The label of a position that cross-entropy ignores."""

_RATE = 0.15
_PRIME = 65519  # 3 does not divide _PRIME - 1, so cubing modulo it maps no two numbers to the same one
_STRIDE = 40503


def hidden_positions(input_ids: Tensor) -> Tensor:
    """Chooses the tokens to hide: about 15 % of each row and at least one, in pseudorandom positions.

    The choice is a function of the row's tokens and uses no random generator. Every backend thus hides the same tokens
    of a sample, so that losses can be compared, and an evaluation always gives the same loss.

    Args:
        input_ids: token ids, int64 [B, T].

    Returns:
        A boolean tensor [B, T] that is true for a token to hide.
    """
    position = torch.arange(input_ids.shape[1], device=input_ids.device)
    salt = (input_ids * (position + 1)).sum(-1, keepdim=True) % _PRIME
    mixed = (position * _STRIDE + salt) % _PRIME
    score = mixed * mixed % _PRIME * mixed % _PRIME
    return (score < int(_RATE * _PRIME)) | (score == score.amin(-1, keepdim=True))


def check_mask_token(token: int, vocab_size: int) -> int:
    """Returns the token if it is in the vocabulary.

    Raises:
        RequestError: the token is outside the vocabulary.
    """
    if not 0 <= token < vocab_size:
        raise RequestError(f"model.params.mask_token_id={token} is outside the vocabulary of {vocab_size} tokens")
    return token


class HidesTokens:
    """A mixin for a transformers masked-LM class. If labels are given, it hides tokens and trains on those alone.

    Every hidden token becomes `mask_token_id`. BERT's own recipe replaces a tenth of the hidden tokens by random ones
    and leaves another tenth unchanged; this class does not. Parameter names stay those of the transformers class.
    """

    mask_token_id: int

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        """Returns the transformers output for ids of shape [B, T]. Its `loss` is the mean over the hidden tokens.

        Without labels, no token is hidden. Positions with the label -100 do not enter the loss.
        """
        if labels is not None:
            hidden = hidden_positions(input_ids)
            labels = labels.masked_fill(~hidden, IGNORED)
            input_ids = input_ids.masked_fill(hidden, self.mask_token_id)
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels)  # type: ignore[misc]

    def loss_items(self, batch: dict[str, Tensor]) -> int:
        """The hidden tokens of a batch whose labels are not ignored: what the loss is the mean over."""
        return int((hidden_positions(batch["input_ids"]) & (batch["labels"] != IGNORED)).sum())
