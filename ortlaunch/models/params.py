"""Checks the parameters of pretrained models before one is built."""

from __future__ import annotations

from pathlib import Path

from ortlaunch.base.errors import RequestError
from ortlaunch.base.nearest import nearest

TASKS = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "image-classification": "AutoModelForImageClassification",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
}
"""The transformers class that loads a pretrained model for each task."""


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
