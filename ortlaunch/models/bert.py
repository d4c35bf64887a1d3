"""BERT (Devlin et al., 2019) with its masked-language-modelling head, transformers' class."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PreTrainedModel

from ortlaunch.models.from_config import build_from_config
from ortlaunch.models.masking import HidesTokens, check_mask_token


class BertForMaskedLM(HidesTokens, transformers.BertForMaskedLM):
    """transformers' BertForMaskedLM, hiding 15 % of the tokens itself: data sources give labels equal to the inputs."""


def build(mask_token_id: int | None = None, **params: Any) -> PreTrainedModel:
    """A BertForMaskedLM with random weights.

    Args:
        mask_token_id: Token put in the place of hidden ones; None takes the last of the vocabulary. BERT's own
            tokenizer has it at 103.
        **params: Fields of BertConfig; the defaults are the published 110M model's.

    Raises:
        RequestError: for an unknown field, or a mask token outside the vocabulary.
    """
    model = build_from_config(BertForMaskedLM, {}, params)
    size = model.config.vocab_size
    model.mask_token_id = check_mask_token(size - 1 if mask_token_id is None else mask_token_id, size)
    return model
