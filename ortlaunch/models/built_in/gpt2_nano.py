"""GPT-2 with about a million parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ortlaunch.models.registry import register_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DEFAULTS = {"vocab_size": 256, "n_positions": 1024, "n_embd": 128, "n_layer": 4, "n_head": 4}


@register_model("gpt2_nano", inputs="tokens", static_graph=True)
def build(**params: Any) -> PreTrainedModel:
    """GPT-2 over bytes at 957,184 parameters

    It has the class of model=gpt2 and one vocabulary entry for each byte.
    """
    from ortlaunch.models.lazy_scipy import import_losses

    import_losses()
    from transformers import GPT2LMHeadModel

    from ortlaunch.models.from_config import build_from_config

    return build_from_config(GPT2LMHeadModel, _DEFAULTS, params)
