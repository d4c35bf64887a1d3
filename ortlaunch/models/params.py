"""Checks the parameters of model builders before a model is built."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ortlaunch.base.errors import RequestError
from ortlaunch.base.nearest import nearest

TASKS = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "image-classification": "AutoModelForImageClassification",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
}
"""The transformers class that loads a pretrained model for each task."""
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def refuse_unknown(names: Iterable[str], accepted: Iterable[str], owner: str) -> None:
    """Checks parameter names against those that `owner` accepts.

    Raises:
        RequestError: a name is not accepted. The message lists the accepted names and suggests the nearest.
    """
    known = sorted(accepted)
    for name in names:
        if name in known:
            continue
        close = nearest(name, known)
        hint = f" Did you mean model.params.{close}?" if close else ""
        listed = ", ".join(known) if known else "none at all"
        raise RequestError(f"model.params.{name}: {owner} has no parameter of this name.{hint} It accepts: {listed}")


def check_arguments(builder: Callable[..., Any], params: Mapping[str, Any], owner: str) -> None:
    """Checks that a builder can be called with `params`. It reads the signature and does not call the builder.

    Raises:
        RequestError: the builder does not have a parameter (unless it takes ``**kwargs``), or one is missing.
    """
    try:
        arguments = inspect.signature(builder).parameters.values()
    except (TypeError, ValueError):  # Some callables that are written in C have no signature.
        return
    named = [argument for argument in arguments if argument.kind in _BY_NAME]
    if not any(argument.kind is inspect.Parameter.VAR_KEYWORD for argument in arguments):
        refuse_unknown(params, [argument.name for argument in named], owner)
    needed = [argument.name for argument in named if argument.default is inspect.Parameter.empty]
    missing = [name for name in needed if name not in params]
    if missing:
        keys = ", ".join(f"model.params.{name}" for name in missing)
        raise RequestError(f"{owner} cannot be built without {keys}: give {'it' if len(missing) == 1 else 'them'}")


def check_task(task: str) -> None:
    """Raises RequestError if a task is none of `TASKS`."""
    if task in TASKS:
        return
    close = nearest(task, TASKS)
    hint = f" Did you mean {close}?" if close else ""
    raise RequestError(f"model.params.task={task} is unknown.{hint} There are: {', '.join(TASKS)}")


def pretrained_source(pretrained: str) -> str:
    """Returns where a pretrained model is: the folder, with `~` expanded, or the hub id.

    Raises:
        RequestError: there is no such folder.
    """
    path = Path(pretrained).expanduser()
    looks_like_path = pretrained.startswith((".", "/", "~")) or pretrained.count("/") > 1
    if looks_like_path and not path.is_dir():
        raise RequestError(f"model.params.pretrained={pretrained}: there is no such folder")
    return str(path) if path.is_dir() else pretrained
