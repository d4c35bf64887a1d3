"""Loads any pretrained model that transformers can find by folder or hub id."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedModel

from ortlaunch.base.errors import RequestError
from ortlaunch.models.from_config import check_fields, training_fields
from ortlaunch.models.masking import HidesTokens, check_mask_token
from ortlaunch.models.params import TASKS, check_task, pretrained_source


def load(
    pretrained: str,
    task: str = "causal-lm",
    mask_token_id: int | None = None,
    trust_remote_code: bool = False,
    **params: Any,
) -> PreTrainedModel:
    """Loads a pretrained model with its weights in fp32, whatever type the files hold.

    Args:
        pretrained: a folder that `save_pretrained` wrote, or an id on the hub.
        task: one of `TASKS`.
        mask_token_id: for masked-lm, the token that replaces hidden tokens; None uses the mask token of the model's
            tokenizer.
        trust_remote_code: run the model's code that lies with its weights.
        **params: fields of the model's configuration to change.

    Raises:
        RequestError: the model, the task or a field is unknown, or the model cannot be loaded.
    """
    check_task(task)
    source = pretrained_source(pretrained)
    code = {"trust_remote_code": trust_remote_code}
    config = _loaded(pretrained, AutoConfig.from_pretrained, source, **code)
    check_fields(config, params, f"{type(config).__name__} of {pretrained}")
    # The configuration is read again with the changes, because transformers derives some fields from others.
    config = _loaded(pretrained, AutoConfig.from_pretrained, source, **{**training_fields(config), **params}, **code)
    auto = getattr(transformers, TASKS[task])
    model = _loaded(pretrained, auto.from_pretrained, source, config=config, dtype=torch.float32, **code)
    if task == "masked-lm":
        _hide_tokens(
            model, check_mask_token(_mask_token(source, mask_token_id, trust_remote_code), model.config.vocab_size)
        )
    return model.train()


def _loaded(pretrained: str, load: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return load(*args, **kwargs)
    except (OSError, ValueError, StrictDataclassError) as error:
        if "trust_remote_code" in str(error):
            raise RequestError(
                f"model.params.pretrained={pretrained} brings Python code of its own: if you trust it, "
                "model.params.trust_remote_code=true runs it"
            ) from error
        raise RequestError(
            f"model.params.pretrained={pretrained} cannot be loaded: {error}\nGive a folder written by "
            "save_pretrained, or an id on the hub that this machine can reach or has in its cache"
        ) from error


def _mask_token(source: str, chosen: int | None, trust_remote_code: bool) -> int:
    if chosen is not None:
        return chosen
    tokenizer = _tokenizer(source, trust_remote_code)
    # Without tokenizer files, transformers makes a tokenizer that has only its special tokens.
    known = tokenizer is not None and len(tokenizer) > len(tokenizer.all_special_tokens)
    if not known or tokenizer.mask_token_id is None:
        raise RequestError(f"{source} has no tokenizer with a mask token: give model.params.mask_token_id")
    return tokenizer.mask_token_id


def _tokenizer(source: str, trust_remote_code: bool) -> Any:
    """The model's tokenizer; None if it has none, or if it cannot be loaded here."""
    try:
        return transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError):
        return None


def _hide_tokens(model: Any, token: int) -> None:
    kind = type(model)
    # The class keeps its name, because transformers chooses the loss by it and writes it to saved configurations.
    model.__class__ = type(kind.__name__, (HidesTokens, kind), {"__module__": __name__, "__doc__": kind.__doc__})
    model.mask_token_id = token
