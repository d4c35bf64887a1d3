"""Llama (Touvron et al., 2023), transformers' class."""

from __future__ import annotations

from typing import Any

from transformers import LlamaForCausalLM, PreTrainedModel

from ortlaunch.models.from_config import build_from_config

_DEFAULTS = {
    "vocab_size": 256,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "max_position_embeddings": 1024,
}


def build(**params: Any) -> PreTrainedModel:
    """A LlamaForCausalLM with random weights; `params` are fields of LlamaConfig.

    The defaults make a model of 14 million parameters over bytes.
    """
    return build_from_config(LlamaForCausalLM, _DEFAULTS, params)
