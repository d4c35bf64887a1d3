"""What an estimate says beyond what it knows for sure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.estimate.band import MIB, Band
from ortlaunch.estimate.probe import Peak
from ortlaunch.estimate.probing import Line
from ortlaunch.estimate.study import Found, Study


@pytest.mark.parametrize(
    ("limit", "largest", "likely"),
    [
        # 32 needs 420 MiB. 64 is near the probes, whose band is narrow.
        (300, 0, 16),
        (450, 0, 32),
        (450, 40, None),
        (50, 0, None),
    ],
)
def test_a_micro_batch_far_from_the_probes_is_called_likely(
    limit: int, largest: int, likely: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def machine(_study: Study, found: Found) -> Band:
        return found.probed["ort"]["step"]

    monkeypatch.setattr(Study, "_machine", machine)
    monkeypatch.setattr(Study, "_changes", lambda *_: ())
    words = ["model=gpt2_nano", "backend=ort", "trainer=single", "device=cpu", "train.batch_size=256"]
    study = cast(Any, object.__new__(Study))
    study._config = to_config(compose(words))
    study._traces = SimpleNamespace(beside=0)
    study._possible = [study._config]
    study._request = SimpleNamespace(limit=limit * MIB, world_size=1)
    study._lines = {"ort": Line({size: {"step": Peak(*3 * [(100 + 10 * size) * MIB])} for size in (128, 256)})}
    study._found_asked = SimpleNamespace(trace=None)
    assert study._likely(largest) == likely
    change = study._nearest_change(0)
    if limit == 300:
        assert change.startswith("train.batch_size=16 train.grad_accumulation=16 is likely enough")
    elif limit == 50:
        assert change.startswith("none of")
