"""Builds transformers models with random weights from the fields of their configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig, PreTrainedModel

from ortlaunch.base.errors import RequestError
from ortlaunch.base.targets import refuse_unknown

_Model = TypeVar("_Model", bound=PreTrainedModel)
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_NOT_SETTABLE = {"model_type", "transformers_version", "_name_or_path"}
_BESIDE_THE_FIELDS = {"attn_implementation", "num_labels"}


def build_from_config(model_class: type[_Model], defaults: Mapping[str, Any], params: Mapping[str, Any]) -> _Model:
    """Builds a model of `model_class` with random weights.

    Args:
        model_class: a transformers class. Its `config_class` has the fields.
        defaults: this project's defaults, which replace those of transformers.
        params: the user's fields, which override the defaults.

    Raises:
        RequestError: the configuration does not have a field, or transformers refuses a value.
    """
    config_class: Any = model_class.config_class
    try:
        blank = config_class()
        check_fields(blank, params, model_class.__name__)
        values = {**training_fields(blank), **defaults, **params}
        # The ids are removed before the configuration is built, because transformers warns of ids outside the
        # vocabulary.
        values |= dict.fromkeys(_missing_tokens(blank, params, values.get("vocab_size")))
        return model_class(config_class(**values))
    except (TypeError, ValueError, StrictDataclassError, ZeroDivisionError) as error:
        raise RequestError(f"model.params: {model_class.__name__} cannot be built with these: {error}") from error
    except KeyError as error:  # The tables of transformers, such as that of its activations.
        raise RequestError(f"model.params: {model_class.__name__} cannot be built with these: no {error}") from error


def check_fields(config: PretrainedConfig, params: Mapping[str, Any], owner: str) -> None:
    """Refuses fields that `config` does not have. transformers would store such a field and never use it.

    Raises:
        RequestError: a field is unknown (the message names the nearest known one), or `use_cache` is true.
    """
    known = set(config.to_dict()) | set(config.attribute_map) | _BESIDE_THE_FIELDS
    refuse_unknown(params, known - _NOT_SETTABLE, owner, "model.params")
    if params.get("use_cache"):
        raise RequestError("model.params.use_cache: training needs no cache and ORTModule cannot return one: drop it")


def training_fields(config: PretrainedConfig) -> dict[str, Any]:
    """The fields that training sets: no cache of keys and values, which ORTModule cannot return."""
    return {"use_cache": False} if hasattr(config, "use_cache") else {}


def _missing_tokens(config: PretrainedConfig, params: Mapping[str, Any], vocab_size: int | None) -> list[str]:
    """The names of special tokens whose default id is outside the vocabulary.

    Args:
        config: the configuration with the default ids.
        params: the user's fields. Tokens that the user sets are not returned.
        vocab_size: the model's vocabulary size; None for the default in `config`.
    """
    size = vocab_size or getattr(config, "vocab_size", None)
    tokens = {name: getattr(config, name, None) for name in _SPECIAL_TOKENS if name not in params}
    return [name for name, token in tokens.items() if size and isinstance(token, int) and token >= size]
