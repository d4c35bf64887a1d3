"""Any pretrained model that transformers can load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ortlaunch.models.registry import register_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# A static graph cannot be assumed: some architectures skip layers at random, or do not use all parameters in a step.
@register_model("hf")
def build(
    pretrained: str,
    task: str = "causal-lm",
    mask_token_id: int | None = None,
    trust_remote_code: bool = False,
    **params: Any,
) -> PreTrainedModel:
    """a pretrained transformers model, by model.params.pretrained

    See `ortlaunch.models.pretrained.load` for the arguments.
    """
    from ortlaunch.models.lazy_scipy import import_losses

    import_losses()
    from ortlaunch.models.pretrained import load

    return load(pretrained, task, mask_token_id, trust_remote_code, **params)
