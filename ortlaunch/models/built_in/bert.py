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
        mask_token_id: the token that replaces hidden tokens; None uses the last one of the vocabulary. In BERT's own
            tokenizer it is 103.
        **params: fields of BertConfig. The defaults are those of the published model.

    Raises:
        RequestError: a field is unknown, or the mask token is outside the vocabulary.
    """
    from ortlaunch.models.lazy_scipy import import_losses

    import_losses()
    from ortlaunch.models.from_config import build_from_config
    from ortlaunch.models.masked_bert import BertForMaskedLM
    from ortlaunch.models.masking import check_mask_token

    model = build_from_config(BertForMaskedLM, {}, params)
    size = model.config.vocab_size
    model.mask_token_id = check_mask_token(size - 1 if mask_token_id is None else mask_token_id, size)
    return model
