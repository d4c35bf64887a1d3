"""Vision transformer for small grey images (Dosovitskiy et al., 2021), transformers' class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ortlaunch.models.registry import register_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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


@register_model("vit", inputs="images", static_graph=True)
def build(**params: Any) -> PreTrainedModel:
    """small vision transformer for 8x8 grey images, 202,186 parameters

    The model is a ViTForImageClassification with random weights. `params` are fields of ViTConfig.
    """
    from ortlaunch.models.lazy_scipy import import_losses

    import_losses()
    from transformers import ViTForImageClassification

    from ortlaunch.models.from_config import build_from_config

    return build_from_config(ViTForImageClassification, _DEFAULTS, params)
