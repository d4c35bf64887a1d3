"""A feed-forward network with one hidden layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortlaunch.models.registry import register_model

if TYPE_CHECKING:
    from ortlaunch.models.feed_forward import FeedForward


@register_model("mlp", inputs="images", static_graph=True)
def build(input_dim: int = 64, hidden_dim: int = 256, output_dim: int = 10) -> FeedForward:
    """feed-forward network with one hidden layer, 19,210 parameters

    The defaults suit 8x8 grey images of 10 classes.
    """
    from ortlaunch.models.feed_forward import FeedForward

    return FeedForward(input_dim, hidden_dim, output_dim)
