"""transformers' BERT with its masked-language-modelling head, hiding the tokens itself."""

from __future__ import annotations

import transformers

from ortlaunch.models.masking import HidesTokens


class BertForMaskedLM(HidesTokens, transformers.BertForMaskedLM):
    """transformers' BertForMaskedLM, hiding 15 % of the tokens itself: data sources give labels equal to the inputs."""
