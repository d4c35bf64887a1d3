"""transformers models with random weights, from a configuration given by field names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig, PreTrainedModel

from ortlaunch.base.errors import RequestError
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
        # Before it is built: transformers warns of ids outside the vocabulary.
        values |= dict.fromkeys(_missing_tokens(blank, params, values.get("vocab_size")))
        return model_class(config_class(**values))
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


def _missing_tokens(config: PretrainedConfig, params: Mapping[str, Any], vocab_size: int | None) -> list[str]:
    """Names of special tokens whose default id a vocabulary does not have.

    Args:
        config: where the defaults are.
        params: the user's fields, which stay as they are.
        vocab_size: of the model; None for the configuration's own.
    """
    size = vocab_size or getattr(config, "vocab_size", None)
    tokens = {name: getattr(config, name, None) for name in _SPECIAL_TOKENS if name not in params}
    return [name for name, token in tokens.items() if size and isinstance(token, int) and token >= size]
