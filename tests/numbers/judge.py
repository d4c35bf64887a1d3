"""Trains a draw with workers that stay, and holds it against the referee."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ortlaunch.config.load import load_config
from tests.numbers.draws import MODULE, Draw, evaluated, items, loss
from tests.support.pool import Pool, Trained
from tests.support.referee import course_of, difference, replayed


def judged(one: Draw, folder: Path, pools: Callable[[int], Pool]) -> str:
    """What is wrong with the numbers of a draw; empty for nothing.

    Args:
        one: the draw.
        folder: an empty folder.
        pools: the pool of a number of workers.
    """
    (folder / "nets.py").write_text(MODULE)
    common = (*one.words, "tracking=none", "train.log_every=1")
    runs: list[Trained] = []
    records: list[Path] = []

    def train(*words: str) -> Trained:
        records.append(folder / f"record-{len(records)}")
        records[-1].mkdir()
        runs.append(pools(one.workers).train(folder, *common, *words, record=records[-1]))
        return runs[-1]

    if one.resumed_at:
        first = train(f"train.steps={one.resumed_at}", f"train.checkpoint_every={one.resumed_at}")
        if first.error:
            return f"the run failed: {first.error}"
        train(f"train.steps={one.steps}", f"train.resume={first.run_dir}")
    else:
        train(f"train.steps={one.steps}")
    if runs[-1].error:
        return f"the run failed: {runs[-1].error}"
    exact = replayed(
        _model(one),
        loss,
        partial(items, one.kind),
        load_config(runs[-1].run_dir / "config.yaml"),
        records,
        first_steps=one.resumed_at or one.steps,
        sends_buffers=one.sends_buffers,
        workers=one.workers,
        evaluated=evaluated(one),
    )
    return difference(course_of(runs), exact)


def _model(one: Draw) -> Any:
    names: dict[str, Any] = {"__name__": "nets"}
    exec(MODULE, names)
    return names[one.kind]("-".join(one.parts))
