"""What a finished run leaves for later ones."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ortlaunch.compose.hydra_tree import compose
from ortlaunch.compose.prepare import prepared
from ortlaunch.config.load import to_config
from ortlaunch.trainer.auto import kind
from ortlaunch.trainer.auto.finished import note_rate
from ortlaunch.trainer.auto.rates import Rates

CONFIG = prepared(to_config(compose(["model=mlp", "device=cpu", "trainer=single", "backend=eager"])))


def finished(step_seconds: float, **summary: float) -> None:
    """Notes the rate of a run with these figures."""
    summary = {"summary/step_seconds_p50": step_seconds, "summary/steady_steps": 9.0, **summary}
    trained: Any = SimpleNamespace(
        recorder=SimpleNamespace(summary=summary, time_to_first_step=3.0),
        parts=SimpleNamespace(start=SimpleNamespace(step=0)),
    )
    context: Any = SimpleNamespace(config=CONFIG, attempt=0, workers=SimpleNamespace(world_size=1, threads=2))
    note_rate(context, trained)


def test_a_run_too_short_to_see_what_others_took_replaces_no_rate_of_an_idle_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path))
    rates = Rates(kind.facts(CONFIG, world_size=1, threads=2))
    known = {"summary/other_cpu_percent": 0.0}
    finished(0.5)
    assert rates.read()["eager"].step_seconds == 0.5
    finished(0.1, **known)
    finished(0.5)
    assert rates.read()["eager"].step_seconds == 0.1
    finished(0.2, **known)
    assert rates.read()["eager"].step_seconds == 0.2
