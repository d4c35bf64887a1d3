"""Scripts that call `ortlaunch.attach()`: their numbers against plain torch, and where they may be started."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.torchrun import run_probe

PROBE = Path(__file__).with_name("attach_probe.py")


def test_loops_of_many_manners_train_as_plain_torch_does(tmp_path: Path) -> None:
    for workers in (1, 2):
        out = tmp_path / f"of-{workers}.json"
        run_probe(PROBE, out, "eager", workers=workers)
        found = json.loads(out.read_text())
        assert len(found) == 7
        assert {name: error for name, error in found.items() if error > 1e-12} == {}
