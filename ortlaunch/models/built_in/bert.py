"""BERT (Devlin et al., 2019) with its masked-language-modelling head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ortlaunch.models.registry import register_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@register_model("bert", inputs="tokens", static_graph=True)
def build(mask_token_id: int | None = None, **params: Any) -> PreTrainedModel:
    """BERT base, masked language modelling, 110M parameters

    Args:
        mask_token_id: Token put in the place of hidden ones; None takes the last of the vocabulary. BERT's own
            tokenizer has it at 103.
        **params: Fields of BertConfig; the defaults are the published model's.

    Raises:
        RequestError: for an unknown field, or a mask token outside the vocabulary.
    """
    from ortlaunch.models.from_config import build_from_config
    from ortlaunch.models.masked_bert import BertForMaskedLM
    from ortlaunch.models.masking import check_mask_token

    model = build_from_config(BertForMaskedLM, {}, params)
    size = model.config.vocab_size
    model.mask_token_id = check_mask_token(size - 1 if mask_token_id is None else mask_token_id, size)
    return model
