"""GPT-2 (Radford et al., 2019), transformers' class."""

from __future__ import annotations

from typing import Any

from transformers import GPT2LMHeadModel, PreTrainedModel

from ortlaunch.models.from_config import build_from_config

_DEFAULTS = {"attn_pdrop": 0.0}
_NANO = {**_DEFAULTS, "vocab_size": 256, "n_positions": 1024, "n_embd": 128, "n_layer": 4, "n_head": 4}


def build(**params: Any) -> PreTrainedModel:
    """A GPT2LMHeadModel with random weights; `params` are fields of GPT2Config.

    The defaults are the published 124M model's but for attention dropout, which is 0: with it ORTModule cannot train
    through the fused attention. ``attn_pdrop`` above 0 brings it back, with unfused attention.
    """
    return build_from_config(GPT2LMHeadModel, _DEFAULTS, params)


def build_nano(**params: Any) -> PreTrainedModel:
    """The same class at about a million parameters, over bytes: one vocabulary entry for each."""
    return build_from_config(GPT2LMHeadModel, _NANO, params)
