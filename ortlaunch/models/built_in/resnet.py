"""ResNet for grey images (He et al., 2016), transformers' class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ortlaunch.models.registry import register_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DEFAULTS = {
    "num_channels": 1,
    "num_labels": 10,
    "embedding_size": 32,
    "hidden_sizes": [32, 64],
    "depths": [1, 1],
    "layer_type": "basic",
}


@register_model("resnet", inputs="images", static_graph=True)
def build(**params: Any) -> PreTrainedModel:
    """small ResNet for grey images, 78,570 parameters

    The model is a ResNetForImageClassification with random weights. `params` are fields of ResNetConfig.

    The defaults suit images from 8x8 to 32x32. The stem divides height and width by 4, and each stage after the first
    halves them. Batch normalization needs more than one value per channel, so a batch of 8x8 images needs at least two.
    """
    from ortlaunch.models.lazy_scipy import import_losses

    import_losses()
    from transformers import ResNetForImageClassification

    from ortlaunch.models.from_config import build_from_config

    return build_from_config(ResNetForImageClassification, _DEFAULTS, params)
