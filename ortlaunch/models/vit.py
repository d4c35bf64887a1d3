"""Vision transformer for small grey images (Dosovitskiy et al., 2021), transformers' class."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, ViTForImageClassification

from ortlaunch.models.from_config import build_from_config

_DEFAULTS = {
    "image_size": 8,
    "patch_size": 2,
    "num_channels": 1,
    "num_labels": 10,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 256,
}


def build(**params: Any) -> PreTrainedModel:
    """A ViTForImageClassification with random weights; `params` are fields of ViTConfig."""
    return build_from_config(ViTForImageClassification, _DEFAULTS, params)
