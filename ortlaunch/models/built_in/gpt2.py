"""GPT-2 (Radford et al., 2019), transformers' class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ortlaunch.models.registry import register_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@register_model("gpt2", inputs="tokens", static_graph=True)
def build(**params: Any) -> PreTrainedModel:
    """GPT-2 at its published size, 124M parameters

    The model is a GPT2LMHeadModel with random weights. `params` are fields of GPT2Config, with the published model's
    defaults.
    """
    from ortlaunch.models.lazy_scipy import import_losses

    import_losses()
    from transformers import GPT2LMHeadModel

    from ortlaunch.models.from_config import build_from_config

    return build_from_config(GPT2LMHeadModel, {}, params)
