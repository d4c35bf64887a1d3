"""The classifiers of torchvision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ortlaunch.models.registry import register_model

if TYPE_CHECKING:
    from torch import nn


# A static graph cannot be assumed: some architectures leave out layers at random.
@register_model("torchvision", inputs="images")
def build(name: str, **params: Any) -> nn.Module:
    """a classifier of torchvision, by model.params.name

    `params` are arguments of torchvision.models.get_model; the number of classes is that of the data unless
    num_classes is given.
    """
    from ortlaunch.models.vision import from_torchvision

    return from_torchvision(name, params)
