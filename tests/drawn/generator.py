"""Draws a model from one integer seed."""

from __future__ import annotations

import random

from tests.drawn.ends import ENDS
from tests.drawn.features import FEATURES
from tests.drawn.layers import LAYERS
from tests.drawn.operators import OPERATORS
from tests.drawn.piece import Drawn

_CATALOGUES, _WEIGHTS = (LAYERS, FEATURES, OPERATORS), (10, 6, 3)


def draw(seed: int, attempt: int = 0) -> Drawn:
    """Draws a model of a few pieces.

    Args:
        seed: the model is a function of it.
        attempt: how many models of this seed eager PyTorch could not train.
    """
    chance = random.Random(f"{seed}/{attempt}")
    count = chance.choice([1, 2, 3, 3, 4])
    catalogues = chance.choices(_CATALOGUES, _WEIGHTS, k=count)
    pieces = tuple(catalogue.draw(chance, number) for number, catalogue in enumerate(catalogues, 1))
    return Drawn(pieces, ENDS.draw(chance, count + 1))
