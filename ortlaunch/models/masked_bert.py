"""transformers' BERT with its masked-language-modelling head, which hides the tokens itself."""

from __future__ import annotations

import transformers

from ortlaunch.models.masking import HidesTokens


class BertForMaskedLM(HidesTokens, transformers.BertForMaskedLM):
    """transformers' BertForMaskedLM, which hides 15 % of the tokens itself. Data sources give the inputs as labels."""
