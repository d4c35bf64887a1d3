"""The advice after a lack of memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.trainer.memory_error import explained


@pytest.mark.parametrize(("batch", "micro"), [(8, 4), (9, 3), (7, 1)])
def test_the_advice_keeps_the_samples_of_a_step(tmp_path: Path, batch: int, micro: int) -> None:
    config = to_config(compose(["model=mlp", f"train.batch_size={batch}", "train.grad_accumulation=3"]))
    said = str(explained(MemoryError("no room"), config, tmp_path, 0))
    found = re.search(r"train\.batch_size=(\d+) train\.grad_accumulation=(\d+) \(the same samples in a step, ", said)
    assert found is not None, said
    assert "\nortlaunch estimate with the same keys" in said
    assert (int(found[1]), int(found[1]) * int(found[2])) == (micro, 3 * batch)
