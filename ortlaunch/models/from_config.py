"""transformers models with random weights, from a configuration given by field names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig, PreTrainedModel

from ortlaunch.errors import RequestError
from ortlaunch.models.params import refuse_unknown

_Model = TypeVar("_Model", bound=PreTrainedModel)
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_NOT_SETTABLE = {"model_type", "transformers_version", "_name_or_path"}
_BESIDE_THE_FIELDS = {"attn_implementation", "num_labels"}


def build_from_config(model_class: type[_Model], defaults: Mapping[str, Any], params: Mapping[str, Any]) -> _Model:
    """A model of `model_class` with random weights.

    Args:
        model_class: A transformers class; its `config_class` says which fields there are.
        defaults: Fields that this project sets otherwise than transformers does.
        params: The user's fields; they win over the defaults.

    Raises:
        RequestError: for a field the configuration does not have, or a value that transformers refuses.
    """
    config_class: Any = model_class.config_class
    try:
        blank = config_class()
        check_fields(blank, params, model_class.__name__)
        values = {**training_fields(blank), **defaults, **params}
        config = config_class(**values)
        forget_missing_tokens(config, params)
        return model_class(config)
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise RequestError(f"model.params: {model_class.__name__} cannot be built with these: {error}") from error


def check_fields(config: PretrainedConfig, params: Mapping[str, Any], owner: str) -> None:
    """Refuses names that `config` does not have; transformers itself would keep them and use them nowhere.

    Raises:
        RequestError: naming the unknown field and the nearest known one, or a cache asked for.
    """
    known = set(config.to_dict()) | set(config.attribute_map) | _BESIDE_THE_FIELDS
    refuse_unknown(params, known - _NOT_SETTABLE, owner)
    if params.get("use_cache"):
        raise RequestError("model.params.use_cache: training needs no cache and ORTModule cannot return one: drop it")


def training_fields(config: PretrainedConfig) -> dict[str, Any]:
    """Fields that training needs, of those `config` has: no cache of keys and values, which ORTModule cannot return."""
    return {"use_cache": False} if hasattr(config, "use_cache") else {}


def forget_missing_tokens(config: PretrainedConfig, params: Mapping[str, Any]) -> None:
    """Drops default ids of special tokens that a smaller vocabulary does not have."""
    for name in _SPECIAL_TOKENS:
        token = getattr(config, name, None)
        if name not in params and isinstance(token, int) and token >= getattr(config, "vocab_size", token + 1):
            setattr(config, name, None)
