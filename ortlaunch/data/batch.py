"""What a batch is: tensors in dicts, tuples, lists and dataclasses, nested in any way. No other module knows.

The first dimension of a tensor counts samples, and so does a list that is no tensor, as of texts.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.utils.data import default_collate

from ortlaunch.base.errors import RequestError

Batch = Any
"""Tensors, nested; the batches of built-in sources are dicts."""

LABELS = "labels"
PROBABILITIES = "label_probabilities"
"""In place of `LABELS`: a row for each sample, with the share of each class in it."""
IDS = "input_ids"


def mapped(batch: Batch, change: Callable[[torch.Tensor], Any]) -> Batch:
    """A new batch of the same form, with each tensor replaced; what is no tensor stays as it is."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    entries = _entries(batch)
    return batch if entries is None else _rebuilt(batch, [mapped(entry, change) for entry in entries.values()])


def named(batch: Batch) -> dict[str, torch.Tensor]:
    """The tensors of a batch in order, each by its path, such as ``left.input_ids`` or ``0``."""
    return dict(_tensors(batch, ""))


def moved(batch: Batch, device: torch.device, *, copy: bool = False, non_blocking: bool = False) -> Batch:
    """A batch on a device; with `copy`, also of tensors that are there."""
    return mapped(batch, lambda tensor: tensor.to(device, copy=copy, non_blocking=non_blocking))


def cloned(batch: Batch) -> Batch:
    """A copy for a forward, which may change its inputs in place."""
    return mapped(batch, torch.Tensor.clone)


def count(batch: Batch) -> int:
    """The samples of a batch, by its first tensor that has dimensions."""
    return next((len(tensor) for tensor in named(batch).values() if tensor.ndim), 1)


def tokens(batch: Batch) -> int:
    """The tokens of a batch: those of each tensor ``input_ids``."""
    return sum(tensor.numel() for tensor in ids(batch))


def ids(batch: Batch) -> list[torch.Tensor]:
    """The token ids of a batch."""
    return [tensor for path, tensor in named(batch).items() if path.rpartition(".")[2] == IDS]


def labels(batch: Batch) -> torch.Tensor | None:
    """What a loss is computed from beside a model's logits: ``labels``, or the last entry of several in a tuple."""
    if isinstance(batch, Mapping):
        found = batch.get(LABELS)
    else:
        found = batch[-1] if isinstance(batch, tuple | list) and len(batch) > 1 else None
    return found if isinstance(found, torch.Tensor) else None


def is_flat(batch: Batch) -> bool:
    """Whether a batch is a dict of tensors alone."""
    return isinstance(batch, Mapping) and all(isinstance(one, torch.Tensor) for one in batch.values())


def part(batch: Batch, begin: int, end: int) -> Batch | None:
    """Some samples of a batch; None if its tensors have other numbers of samples."""
    number = count(batch)
    if any(not tensor.ndim or len(tensor) != number for tensor in named(batch).values()):
        return None

    def cut(one: Batch) -> Batch:
        if isinstance(one, torch.Tensor):
            return one[begin:end]
        entries = _entries(one)
        if entries is None:
            return one
        if isinstance(one, list) and len(one) == number and not named(one):
            return one[begin:end]
        return _rebuilt(one, [cut(entry) for entry in entries.values()])

    return cut(batch)


def joined(first: Batch, second: Batch) -> Batch | None:
    """Two batches in one; None if their samples have other sizes."""
    sizes, others = ({path: one.shape[1:] for path, one in named(batch).items()} for batch in (first, second))
    if sizes != others or part(first, 0, 0) is None or part(second, 0, 0) is None:
        return None

    def both(one: Batch, other: Batch) -> Batch:
        if isinstance(one, torch.Tensor):
            return torch.cat([one, other])
        entries, following = _entries(one), _entries(other)
        if entries is None or following is None:
            return one
        if isinstance(one, list) and not named(one):
            return [*one, *other]
        return _rebuilt(one, [both(entry, following[name]) for name, entry in entries.items()])

    return both(first, second)


def described(batch: Batch) -> str:
    """The names, shapes and types of a batch's tensors, for a message."""
    found = [
        f"{path or 'one tensor'} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        for path, tensor in named(batch).items()
    ]
    return ", ".join(found) or f"a {type(batch).__name__} without tensors"


def digest(batch: Batch) -> str:
    """A digest of what is in a batch's tensors."""
    state = hashlib.blake2b(described(batch).encode(), digest_size=16)
    for tensor in named(batch).values():
        state.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def collate(samples: Sequence[Any], path: str = "") -> Batch:
    """Makes a batch of samples: dicts, tuples, dataclasses, nested, of tensors, arrays, numbers and texts.

    Tensors are stacked, numbers and lists of numbers become tensors, and texts stay a list.

    Args:
        samples: at least one; all of the same form.
        path: where they stand in the samples, for messages.

    Raises:
        UnlikeError: the samples differ in their form or their shapes, or are of a type that makes no batch.
    """
    first = samples[0]
    entries = None if _is_row(first) else _entries(first)
    if entries is None:
        return _stacked(samples, path)
    for number, sample in enumerate(samples):
        others = _entries(sample)
        if type(sample) is not type(first) or others is None or others.keys() != entries.keys():
            raise UnlikeError(
                number, f"{path or 'the sample'} is {_form(sample)}, and that of the first {_form(first)}"
            )
    columns = [
        collate([(_entries(sample) or {})[name] for sample in samples], f"{path}.{name}".lstrip("."))
        for name in entries
    ]
    return _rebuilt(first, columns)


class UnlikeError(Exception):
    """A sample that does not go into one batch with the first one."""

    def __init__(self, place: int, text: str) -> None:
        super().__init__(text)
        self.place = place
        """Which of the samples it is."""


def check(batch: Batch, where: str) -> None:
    """Refuses a batch without tensors.

    Args:
        batch: what the data gives.
        where: whose it is, for the message.

    Raises:
        RequestError: with its type.
    """
    if not named(batch):
        raise RequestError(
            f"{where} gives {described(batch)}: let collate return tensors in dicts, tuples, lists or dataclasses"
        )


def _entries(batch: Batch) -> dict[Any, Any] | None:
    """The entries of a container by name or number; None for anything else."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, tuple | list):
        return dict(zip(getattr(batch, "_fields", range(len(batch))), batch, strict=True))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return None


def _rebuilt(batch: Batch, entries: list[Any]) -> Batch:
    """A container of the same kind with other entries; a dict of any class becomes a plain one."""
    if isinstance(batch, Mapping):
        return dict(zip(batch, entries, strict=True))
    if isinstance(batch, tuple | list):
        # A named tuple takes its entries one by one.
        return type(batch)(*entries) if hasattr(batch, "_fields") else type(batch)(entries)
    made = copy.copy(batch)
    for field, entry in zip(dataclasses.fields(batch), entries, strict=True):
        object.__setattr__(made, field.name, entry)  # It may be frozen.
    return made


def _tensors(batch: Batch, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(batch, torch.Tensor):
        yield path, batch
        return
    entries = _entries(batch) or {}
    yield from chain.from_iterable(_tensors(one, f"{path}.{name}".lstrip(".")) for name, one in entries.items())


def _is_row(sample: Any) -> bool:
    """Whether a sample's entry is a list of numbers, as data sets of the `datasets` library have it."""
    return isinstance(sample, list) and bool(sample) and all(isinstance(one, int | float) for one in sample)


def _stacked(samples: Sequence[Any], path: str) -> Any:
    if isinstance(samples[0], list):
        samples = [torch.tensor(sample) for sample in samples]
    try:
        return default_collate(list(samples))
    except (TypeError, ValueError, RuntimeError) as error:
        first = _form(samples[0])
        other = next((place for place, sample in enumerate(samples) if _form(sample) != first), 0)
        named_so = f"{path or 'the sample'} is {_form(samples[other])}"
        if not other:
            text = str(error).partition("\n")[0]
            raise UnlikeError(0, f"{named_so}, which makes no batch: {text}") from error
        raise UnlikeError(other, f"{named_so}, and that of the first {first}") from error


def _form(sample: Any) -> str:
    """What a sample is, in few words."""
    if isinstance(sample, Mapping):
        return f"a dict of {', '.join(map(str, sample))}"
    if isinstance(sample, tuple | list):
        return f"a {type(sample).__name__} of {len(sample)}"
    shape = getattr(sample, "shape", None)
    return f"a {type(sample).__name__}" + ("" if shape is None else f" of shape {tuple(shape)}")
