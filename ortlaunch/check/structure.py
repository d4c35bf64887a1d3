"""Checks whether ORTModule accepts the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.check.report import Structure, TensorInfo
from ortlaunch.config.schema import Config
from ortlaunch.data.batch import Batch, named
from ortlaunch.models.checks import check_model, check_precision
from ortlaunch.models.task import loss_of
from ortlaunch.ort.verify.nested import foreign_values, named_tensors
from ortlaunch.trainer.prepare import task_of
from ortlaunch.trainer.ranges import out_of_range

_REGISTERED = ("_parameters", "_buffers", "_modules")
_RETURNED = ("bool", "int", "float", "str")
"""Types besides tensors that ORTModule returns as they are."""


def check_structure(model: object) -> Structure:
    """Checks the return value of a builder before it is run."""
    try:
        check_model(model)
        assert isinstance(model, torch.nn.Module)
        check_precision(model)
    except RequestError as error:
        return Structure("failed", [str(error)])
    unregistered = list(_unregistered(model))
    return Structure(
        "warning" if unregistered else "ok",
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        buffers=sum(1 for _ in model.buffers()),
        unregistered=unregistered,
    )


def check_calls(model: torch.nn.Module, batch: Batch, found: Structure, config: Config) -> None:
    """Runs the model in PyTorch, and adds its inputs, outputs and problems to `found`.

    Args:
        model: the plain model.
        batch: a batch of the run's data.
        found: what is known of the model so far.
        config: the run's configuration, for the keys in messages.
    """
    found.inputs = [_info(name, tensor) for name, tensor in named(batch).items()]
    try:
        with torch.no_grad():
            outputs = task_of(config, model, batch).outputs(model, batch)
        loss_of(outputs, batch)
    except RequestError as error:
        found.problems.append(str(error))
    except Exception as error:
        # The user's own model may raise anything; its error is reported.
        said = out_of_range(error, config)
        found.problems.append(said or f"forward fails in PyTorch: {type(error).__name__}: {error}")
    else:
        found.outputs = [_info(name, tensor) for name, tensor in named_tensors(outputs).items()]
        found.problems += [
            f"forward returns a {kind} as '{path}': ORTModule returns tensors, numbers, texts, dicts and lists"
            for path, kind in foreign_values(outputs).items()
            if kind not in _RETURNED
        ]
    if found.problems:
        found.status = "failed"


def _unregistered(model: torch.nn.Module) -> Iterator[TensorInfo]:
    """Returns floating-point tensors in plain attributes; trainable ones have already been refused."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in _REGISTERED:
                continue
            for tensor in _tensors(value):
                yield _info(f"{path}.{name}".lstrip("."), tensor)


def _tensors(value: Any) -> list[torch.Tensor]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    return [item for item in items if torch.is_tensor(item) and item.is_floating_point()]


def _info(name: str, tensor: torch.Tensor) -> TensorInfo:
    return TensorInfo(name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
