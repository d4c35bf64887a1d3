"""Masked language modelling on batches whose labels are their own inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ortlaunch.base.errors import RequestError

IGNORED = -100
"""Label of a position that cross-entropy leaves out."""

_RATE = 0.15
_PRIME = 65519  # 3 does not divide _PRIME - 1, so cubing modulo it maps no two numbers to the same one
_STRIDE = 40503


def hidden_positions(input_ids: Tensor) -> Tensor:
    """Which tokens to hide: about 15 % of each row and at least one, scattered as if at random.

    The choice is computed from the row's own tokens and draws no random number. Every backend thus hides the same
    tokens of the same sample, so that their losses can be compared, and an evaluation gives the same loss twice.

    Args:
        input_ids: Token ids, int64 [B, T].

    Returns:
        Boolean [B, T], true where a token is to be hidden.
    """
    position = torch.arange(input_ids.shape[1], device=input_ids.device)
    salt = (input_ids * (position + 1)).sum(-1, keepdim=True) % _PRIME
    mixed = (position * _STRIDE + salt) % _PRIME
    score = mixed * mixed % _PRIME * mixed % _PRIME
    return (score < int(_RATE * _PRIME)) | (score == score.amin(-1, keepdim=True))


def check_mask_token(token: int, vocab_size: int) -> int:
    """The token itself, if the vocabulary has it.

    Raises:
        RequestError: if not.
    """
    if not 0 <= token < vocab_size:
        raise RequestError(f"model.params.mask_token_id={token} is outside the vocabulary of {vocab_size} tokens")
    return token


class HidesTokens:
    """Put before a transformers masked-LM class: where labels are given, hides tokens and asks for those alone.

    Every hidden token becomes `mask_token_id`; none is swapped for another or left as it is, as BERT's own recipe
    does with a fifth of them. Parameter names stay those of the transformers class.
    """

    mask_token_id: int

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        """The transformers output for ids of shape [B, T]; `loss` is the mean over the hidden tokens.

        Without labels nothing is hidden. Positions labelled -100 stay out of the loss.
        """
        if labels is not None:
            hidden = hidden_positions(input_ids)
            labels = labels.masked_fill(~hidden, IGNORED)
            input_ids = input_ids.masked_fill(hidden, self.mask_token_id)
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels)  # type: ignore[misc]
