"""Data sets as users write them, for `data.target`."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Sample:
    number: int
    parts: Any


class Numbers(Dataset[Any]):
    """Nested samples of numbers, whose lengths differ with `ragged`."""

    def __init__(self, n: int, ragged: bool = False) -> None:
        self.n, self.ragged = n, ragged

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        row = torch.full((1 + index % 3 if self.ragged else 2,), float(index))
        return Sample(index, {"pair": Pair(row, [float(index), f"text {index}"]), "drawn": torch.rand(1)})


class Padded(Numbers):
    """Samples of different lengths, with how they go into a batch."""

    def __init__(self, n: int) -> None:
        super().__init__(n, ragged=True)

    def collate(self, samples: list[Sample]) -> dict[str, torch.Tensor]:
        rows = [sample.parts["pair"].left for sample in samples]
        return {
            "number": torch.tensor([sample.number for sample in samples]),
            "rows": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
        }


class Stream(IterableDataset[Any]):
    """The same for every reader."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        yield from ({"number": number} for number in range(self.n))


class Parts(Stream):
    """A part for each loader process; `of_ranks` has a test name the worker's place."""

    of_ranks = (0, 1)

    def __init__(self, n: int, by_process: bool = True) -> None:
        super().__init__(n)
        self.by_process = by_process

    def part(self) -> tuple[int, int]:
        rank, workers = self.of_ranks
        info = get_worker_info() if self.by_process else None
        place, processes = (info.id, info.num_workers) if info else (0, 1)
        return rank + workers * place, workers * processes

    def __iter__(self) -> Iterator[Any]:
        begin, step = self.part()
        yield from islice(super().__iter__(), begin, None, step)


class Resumable(Parts):
    """Says how far it is, and what it has read since it was made."""

    reads = 0

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.done = 0

    def __iter__(self) -> Iterator[Any]:
        begin, step = self.part()
        for number in range(begin + step * self.done, self.n, step):
            self.done += 1
            Resumable.reads += 1
            yield {"number": number}
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


class Unsaveable(Resumable):
    def state_dict(self) -> dict[str, Any]:
        return {"done": self}


class Fails(Numbers):
    def __getitem__(self, index: int) -> Any:
        return {"number": index, "value": 1 / (index - 3)}


class Endless(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(1)


def of_rank(n: int) -> Parts:
    """A stream that is shared out among workers alone."""
    stream = Parts(n, by_process=False)
    stream.of_ranks = (dist.get_rank(), dist.get_world_size())
    return stream


def both(n: int) -> dict[str, Any]:
    return {"train": Numbers(n), "eval": Numbers(7), "collate": first_numbers}


def first_numbers(samples: list[Sample]) -> torch.Tensor:
    return torch.tensor([sample.number for sample in samples])


def no_train(n: int) -> dict[str, Any]:
    return {"training": Numbers(n)}


def generated(n: int) -> Any:
    return (index for index in range(n))


def loader(n: int) -> Any:
    return DataLoader(Numbers(n))


def nothing(n: int) -> None:
    return None


def fails(n: int) -> Any:
    raise KeyError("a column")


def no_tensors(n: int) -> dict[str, Any]:
    return {"train": Numbers(n), "collate": lambda samples: "text"}


def bad_collate(n: int) -> dict[str, Any]:
    return {"train": Numbers(n), "collate": lambda samples: torch.stack([sample.parts for sample in samples])}
