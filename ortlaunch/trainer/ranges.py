"""Token ids and labels beyond what a model knows: found in its first forward, and explained where a step fails."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ortlaunch.base.errors import RequestError, TrainingError
from ortlaunch.base.own_code import is_users
from ortlaunch.config.load import first_line
from ortlaunch.config.schema import Config, TokenDataConfig
from ortlaunch.data.batch import IDS, LABELS, named
from ortlaunch.data.loader import Loader
from ortlaunch.models.task import Batch

_FUNCTIONAL = Path("torch", "nn", "functional.py").parts
_EMBEDDING, _LOSS = "embedding", "cross entropy"
_LOSSES = ("cross_entropy", "nll_loss")
_IGNORED = -100
"""The label that PyTorch's losses leave out."""
_SIGNS = ("index out of bounds", "out of data bounds")
"""What compiled code and ONNX Runtime say. They name neither the id nor the layer."""


class Ranges(TorchFunctionMode):
    """As a context around a forward, it notes how many ids or classes the model has for what a batch gives it.

    It notes a tensor only if it reaches an embedding or a loss as it is, so a model that clamps its ids is not misread.
    """

    def __init__(self, batch: Batch) -> None:
        """
        Args:
            batch: the batch, on the CPU, of which the forward computes a part.
        """
        super().__init__()
        self._batch = batch
        self._known: dict[str, tuple[str, int]] = {}
        """For each tensor of the batch what it reaches, and the least number of ids or classes that this has."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Notes calls of embeddings and cross entropies, and calls the function."""
        kwargs = kwargs or {}
        if func is functional.embedding:
            self._note(args[0], _EMBEDDING, args[1].shape[0])
        elif func is functional.cross_entropy and kwargs.get("ignore_index", _IGNORED) < 0:
            self._note(args[1], _LOSS, args[0].shape[min(1, args[0].ndim - 1)])
        return func(*args, **kwargs)

    def _note(self, given: torch.Tensor, what: str, count: int) -> None:
        if given.is_floating_point():
            return  # The target is a share of each class.
        place = given.untyped_storage().data_ptr()
        for name, one in named(self._batch).items():
            if one.untyped_storage().data_ptr() == place and count < self._known.get(name, (what, count + 1))[1]:
                self._known[name] = (what, count)

    def check(self, config: Config, loader: Loader) -> None:
        """Refuses data with more ids or classes than the model has, or a batch with an id or a label beyond them.

        Raises:
            RequestError: with the numbers of both, and the key.
        """
        for name, (what, count) in self._known.items():
            given = loader.num_classes if what == _LOSS and loader.num_classes is not None else loader.vocab_size
            # Positions and types of tokens are embedded too.
            of_data = name.rpartition(".")[2] in (IDS, LABELS)
            if of_data and given is not None and given > count:
                things = "classes" if given is loader.num_classes else "token ids"
                numbers = f"the data has {given} {things} and the model's {what} knows {count}"
                raise RequestError(f"{numbers}: {_remedy(config, count, given)}")
            if (said := _beyond(named(self._batch)[name], what, count)) is not None:
                raise RequestError(f"{said}: {_remedy(config, count)}")


def out_of_range(error: BaseException, config: Config) -> str | None:
    """What to say of an error of PyTorch about an id or a label beyond what the model knows; None for other errors."""
    if not isinstance(error, IndexError | RuntimeError):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        if (found := _arguments(frame)) is None:
            continue
        what, given, count = found
        said = _beyond(given, what, count)
        if said is None:
            return None
        own = [one for one in frames if is_users(one.f_code.co_filename)]
        place = f" ({own[-1].f_code.co_filename}, in {own[-1].f_code.co_name})" if own else ""
        if what == _EMBEDDING and _are_positions(given) and isinstance(config.data, TokenDataConfig):
            return f"{said}{place}: lower data.seq_len to {count}, or raise that number"
        return f"{said}{place}: {_remedy(config, count)}"
    return None


def explained(error: BaseException, config: Config) -> BaseException:
    """The error itself; one about an id or a label beyond what the model knows is replaced by one that says so."""
    if (said := out_of_range(error, config)) is not None:
        return TrainingError(said)
    if isinstance(error, Exception) and any(sign in str(error) for sign in _SIGNS):
        return TrainingError(
            f"{first_line(error)}\nA token id or a label of the data is probably beyond what the model knows "
            "(model.params, data.vocab_size): backend=eager names it"
        )
    return error


def _arguments(frame: FrameType) -> tuple[str, torch.Tensor, int] | None:
    """What a function of PyTorch was given: what it is, the ids or labels, and the number that it knows."""
    if Path(frame.f_code.co_filename).parts[-3:] != _FUNCTIONAL:
        return None
    values = frame.f_locals
    if frame.f_code.co_name == "embedding":
        return _EMBEDDING, values["input"], values["weight"].shape[0]
    if frame.f_code.co_name in _LOSSES:
        logits, target = values["input"], values["target"]
        return _LOSS, target[target != values.get("ignore_index", _IGNORED)], logits.shape[min(1, logits.ndim - 1)]
    return None


def _beyond(given: torch.Tensor, what: str, count: int) -> str | None:
    """A text on an id or a label that is out of range; None where all are in it."""
    if given.is_floating_point():
        return None
    values = given if what == _EMBEDDING else given[given != _IGNORED]
    if not values.numel():
        return None
    least, largest = int(values.min()), int(values.max())
    if least >= 0 and largest < count:
        return None
    value = least if least < 0 else largest
    if what == _EMBEDDING:
        return f"an embedding of the model gets the id {value} and knows 0 to {count - 1}"
    return f"the data has the label {value} and the model knows 0 to {count - 1}"


def _are_positions(given: torch.Tensor) -> bool:
    """Whether ids count up, as the places of tokens do."""
    return given.ndim > 0 and given.shape[-1] > 1 and bool((given.diff() == 1).all())


def _remedy(config: Config, count: int, needed: int | None = None) -> str:
    keys = [key for key, value in config.model.params.items() if value == count and not isinstance(value, bool)]
    if len(keys) == 1 and needed is not None:
        return f"set model.params.{keys[0]}={needed}"
    of = f"model.params.{keys[0]}" if len(keys) == 1 else "that number of the model (model.params)"
    to = "" if needed is None else f" to {needed}"
    return f"raise {of}{to}, or choose other data (data={config.data.name})"
