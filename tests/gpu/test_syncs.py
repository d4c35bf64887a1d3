"""Between log steps the host does not wait for the GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.proof.proof import Training
from tests.gpu.proof.watching import syncs_of

Train = Callable[..., dict[str, Any]]


@pytest.mark.parametrize("trainer", ["ddp", "fsdp"])
def test_the_host_waits_at_log_steps_only(train: Train, tmp_path: Path, trainer: str) -> None:
    watched = ("model.imports=[tests.gpu.watched_syncs]", "train.steps=40", "train.log_every=10")
    train("backend=eager", f"trainer={trainer}", *watched)
    steps, lines = syncs_of(Training(tmp_path), 0)
    assert steps == 39
    assert not lines
