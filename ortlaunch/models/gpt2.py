"""GPT-2 (Radford et al., 2019), transformers' class."""

from __future__ import annotations

from typing import Any

from transformers import GPT2LMHeadModel, PreTrainedModel

from ortlaunch.models.from_config import build_from_config

_NANO = {"vocab_size": 256, "n_positions": 1024, "n_embd": 128, "n_layer": 4, "n_head": 4}


def build(**params: Any) -> PreTrainedModel:
    """A GPT2LMHeadModel with random weights; `params` are fields of GPT2Config, the defaults the published 124M's."""
    return build_from_config(GPT2LMHeadModel, {}, params)


def build_nano(**params: Any) -> PreTrainedModel:
    """The same class at about a million parameters, over bytes: one vocabulary entry for each."""
    return build_from_config(GPT2LMHeadModel, _NANO, params)
