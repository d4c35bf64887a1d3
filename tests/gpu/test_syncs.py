"""Between log steps the host does not wait for the GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu.proof.numbers import TRAINERS
from tests.gpu.proof.proof import Training
from tests.gpu.proof.watching import WATCHED, syncs_of

Train = Callable[..., Training]


@pytest.mark.parametrize("trainer", ["DDP", "FSDP2"])
def test_the_host_waits_at_log_steps_only(train: Train, trainer: str) -> None:
    steps, lines = syncs_of(train(*WATCHED, *TRAINERS[trainer]), 0)
    assert steps == 39
    assert not lines
