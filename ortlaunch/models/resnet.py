"""ResNet for grey images (He et al., 2016), transformers' class."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, ResNetForImageClassification

from ortlaunch.models.from_config import build_from_config

_DEFAULTS = {
    "num_channels": 1,
    "num_labels": 10,
    "embedding_size": 32,
    "hidden_sizes": [32, 64],
    "depths": [1, 1],
    "layer_type": "basic",
}


def build(**params: Any) -> PreTrainedModel:
    """A ResNetForImageClassification with random weights; `params` are fields of ResNetConfig.

    The defaults suit images from 8x8 to 32x32. Each stage after the first halves height and width, which the stem has
    already quartered. Batch normalization needs more than one value per channel: at 8x8 more than one image.
    """
    return build_from_config(ResNetForImageClassification, _DEFAULTS, params)
