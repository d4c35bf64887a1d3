"""Loads any pretrained model that transformers can find by folder or hub id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedModel

from ortlaunch.base.errors import RequestError
from ortlaunch.base.nearest import nearest
from ortlaunch.models.from_config import check_fields, training_fields
from ortlaunch.models.masking import HidesTokens, check_mask_token

TASKS = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "image-classification": "AutoModelForImageClassification",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
}
"""The transformers class that loads a model for each task."""


def load(pretrained: str, task: str = "causal-lm", mask_token_id: int | None = None, **params: Any) -> PreTrainedModel:
    """Loads a pretrained model with its weights in fp32, whatever type the files hold.

    Args:
        pretrained: a folder that `save_pretrained` wrote, or an id on the hub.
        task: one of `TASKS`.
        mask_token_id: for masked-lm, the token that replaces hidden tokens; None uses the mask token of the model's
            tokenizer.
        **params: fields of the model's configuration to change.

    Raises:
        RequestError: the model, the task or a field is unknown, or the model cannot be loaded.
    """
    _check_task(task)
    source = _source(pretrained)
    config = _loaded(pretrained, AutoConfig.from_pretrained, source)
    check_fields(config, params, f"{type(config).__name__} of {pretrained}")
    # The configuration is read again with the changes, because transformers derives some fields from others.
    config = _loaded(pretrained, AutoConfig.from_pretrained, source, **{**training_fields(config), **params})
    auto = getattr(transformers, TASKS[task])
    model = _loaded(pretrained, auto.from_pretrained, source, config=config, dtype=torch.float32)
    if task == "masked-lm":
        _hide_tokens(model, check_mask_token(_mask_token(source, mask_token_id), model.config.vocab_size))
    return model.train()


def _check_task(task: str) -> None:
    if task in TASKS:
        return
    close = nearest(task, TASKS)
    hint = f" Did you mean {close}?" if close else ""
    raise RequestError(f"model.params.task={task} is unknown.{hint} There are: {', '.join(TASKS)}")


def _source(pretrained: str) -> str:
    """The folder, with `~` expanded, or the hub id."""
    path = Path(pretrained).expanduser()
    looks_like_path = pretrained.startswith((".", "/", "~")) or pretrained.count("/") > 1
    if looks_like_path and not path.is_dir():
        raise RequestError(f"model.params.pretrained={pretrained}: there is no such folder")
    return str(path) if path.is_dir() else pretrained


def _loaded(pretrained: str, load: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return load(*args, **kwargs)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise RequestError(
            f"model.params.pretrained={pretrained} cannot be loaded: {error}\nGive a folder written by "
            "save_pretrained, or an id on the hub that this machine can reach or has in its cache"
        ) from error


def _mask_token(source: str, chosen: int | None) -> int:
    if chosen is not None:
        return chosen
    tokenizer = _tokenizer(source)
    # Without tokenizer files, transformers makes a tokenizer that has only its special tokens.
    known = tokenizer is not None and len(tokenizer) > len(tokenizer.all_special_tokens)
    if not known or tokenizer.mask_token_id is None:
        raise RequestError(f"{source} has no tokenizer with a mask token: give model.params.mask_token_id")
    return tokenizer.mask_token_id


def _tokenizer(source: str) -> Any:
    """The model's tokenizer; None if it has none, or if it cannot be loaded here."""
    try:
        return transformers.AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, ImportError):
        return None


def _hide_tokens(model: Any, token: int) -> None:
    kind = type(model)
    # The class keeps its name, because transformers chooses the loss by it and writes it to saved configurations.
    model.__class__ = type(kind.__name__, (HidesTokens, kind), {"__module__": __name__, "__doc__": kind.__doc__})
    model.mask_token_id = token
