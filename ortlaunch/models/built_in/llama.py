"""Llama (Touvron et al., 2023), transformers' class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ortlaunch.models.registry import register_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DEFAULTS = {
    "vocab_size": 256,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "max_position_embeddings": 1024,
}


@register_model("llama", inputs="tokens", static_graph=True)
def build(**params: Any) -> PreTrainedModel:
    """small Llama over bytes, 14M parameters

    The model is a LlamaForCausalLM with random weights. `params` are fields of LlamaConfig.
    """
    from ortlaunch.models.lazy_scipy import import_losses

    import_losses()
    from transformers import LlamaForCausalLM

    from ortlaunch.models.from_config import build_from_config

    return build_from_config(LlamaForCausalLM, _DEFAULTS, params)
