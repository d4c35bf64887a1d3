"""The parts that a drawn model is made of, and how they become the source of a module.

Every piece takes the activations ``h`` of shape (`BATCH`, `LENGTH`, `WIDTH`) and leaves ``h`` in the same shape, so any
piece can be removed and the rest is still a model.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

BATCH, LENGTH, WIDTH, TOKENS = 4, 6, 8, 11
BODY = "BODY"
"""Stands, in a line of its own, for the statements of the pieces inside a piece."""


@dataclass(frozen=True)
class Piece:
    """Some statements of a drawn model. Names of modules, variables and functions end with the piece's number."""

    kind: str
    top: tuple[str, ...] = ()
    """Lines of the module."""
    init: tuple[str, ...] = ()
    """Lines of ``__init__``."""
    forward: tuple[str, ...] = ()
    """Lines of ``forward``."""
    body: tuple[Piece, ...] = ()
    """The pieces whose statements replace the line `BODY`."""
    is_random: bool = False
    """Whether two passes over the same batch differ, so that two runs cannot be compared."""

    def lines(self) -> Iterator[str]:
        """The lines of ``forward`` with those of the body, indented as `BODY` is."""
        for line in self.forward:
            indent = line[: len(line) - len(line.lstrip())]
            if line.strip() == BODY:
                inner = [below for piece in self.body for below in piece.lines()]
                yield from (indent + below for below in inner or ["pass"])
            else:
                yield line

    def all(self) -> Iterator[Piece]:
        """The piece and all pieces inside it; those inside come first."""
        for piece in self.body:
            yield from piece.all()
        yield self


@dataclass(frozen=True)
class Drawn:
    """A drawn model: a function of its seed."""

    pieces: tuple[Piece, ...]
    end: Piece
    """Its statements return what the model returns."""

    @property
    def is_random(self) -> bool:
        """Whether two passes over the same batch differ."""
        return any(piece.is_random for piece in self.all())

    def all(self) -> Iterator[Piece]:
        """All pieces, those inside others too."""
        for piece in (*self.pieces, self.end):
            yield from piece.all()

    def kinds(self) -> list[str]:
        """What the model is made of."""
        return [piece.kind for piece in self.all()]

    def source(self) -> str:
        """The source of a module with the class ``Net``."""
        top = [line for piece in self.all() for line in piece.top]
        init = [line for piece in self.all() for line in piece.init]
        body = [line for piece in (*self.pieces, self.end) for line in piece.lines()]
        if not any("nn." in line for line in init):
            # A model needs something to train.
            init, body = [*init, f"self.scale = nn.Parameter(torch.ones({WIDTH}))"], ["h = h * self.scale", *body]
        arguments = ["x", *(name for name in ("ids", "labels") if re.search(rf"\b{name}\b", "\n".join(body)))]
        return "\n".join(
            [
                "import torch",
                "import torch.nn.functional as F",
                "from torch import nn",
                "",
                *top,
                "",
                "class Net(nn.Module):",
                "    def __init__(self):",
                "        super().__init__()",
                *(f"        {line}" for line in init),
                "",
                f"    def forward(self, {', '.join(arguments)}):",
                "        h = x",
                *(f"        {line}" for line in body),
                "",
            ]
        )


Make = Callable[[random.Random, int], Piece]
"""Draws a piece with a number."""


class Catalogue:
    """Kinds of pieces, each with a weight."""

    def __init__(self) -> None:
        self._makers: list[Make] = []
        self._weights: list[float] = []

    def kind(self, weight: float = 1.0) -> Callable[[Make], Make]:
        """Registers a function that draws a piece."""

        def register(make: Make) -> Make:
            self._makers.append(make)
            self._weights.append(weight)
            return make

        return register

    def draw(self, chance: random.Random, number: int) -> Piece:
        """Draws a kind, and a piece of it."""
        (make,) = chance.choices(self._makers, self._weights)
        return make(chance, number)


def numbered(piece: Piece, number: int) -> Piece:
    """The piece with ``#`` in its lines replaced by a number."""
    return replace(
        piece,
        top=tuple(line.replace("#", str(number)) for line in piece.top),
        init=tuple(line.replace("#", str(number)) for line in piece.init),
        forward=tuple(line.replace("#", str(number)) for line in piece.forward),
    )
