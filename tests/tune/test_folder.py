"""Under which key a tuning is found again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from ortlaunch.compose.hydra_tree import compose
from ortlaunch.compose.prepare import prepared
from ortlaunch.config.load import to_config
from ortlaunch.run.run import Run
from ortlaunch.run.sweep import SweepTask, join, note_end
from ortlaunch.tune.folder import find, key_of, machine, make
from ortlaunch.tune.space import Space
from ortlaunch.tune.words import taken_apart

WORDS = ("model=mlp", "device=cpu", "backend=eager", "trainer=ddp", "launcher.workers_per_node=1,2")
HERE: dict[str, Any] = {"cores": 2}


def key(*words: str, free: tuple[str, ...] = (), limit: int | None = None) -> str:
    taken = taken_apart([*WORDS, "train.grad_accumulation=2", *words], free)
    space = Space(prepared(to_config(compose(taken.composed))), taken, free, ("micro_batch", "checkpointing"))
    return key_of(space, limit, HERE)


def test_what_changes_the_result_changes_the_key() -> None:
    assert key() == key("name=other")
    # The cells have the same texts, but two workers with the same accumulation are another global batch.
    assert key() != key(free=("batch",))
    assert key() != key("optimizer.lr=0.1")
    assert key() != key(limit=2**30)


def test_a_changed_model_is_another_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "nets_of_tune.py"
    words = ("model=factory", "model.target=nets_of_tune:Net", "data=digits")
    found = []
    for layers in (1, 2):
        own.write_text(f"class Net:\n    layers = {layers}\n")
        found.append(key(*words))
        assert found[-1] == key(*words)
    assert found[0] != found[1]


def test_variables_that_change_a_speed_are_part_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    before = machine()
    monkeypatch.setenv("TORCHINDUCTOR_CPP_WRAPPER", "1")
    assert machine() != before


def test_a_search_that_goes_on_is_no_ended_sweep(tmp_path: Path) -> None:
    config = prepared(to_config(compose([*WORDS[:4], f"run_root={tmp_path}"])))
    taken = taken_apart(WORDS, ())
    folder = make(config, "a key", ["tune"], Space(prepared(to_config(compose(taken.composed))), taken).cell)
    folder.open()
    runs = [tmp_path / name for name in ("one", "two")]
    for number, run in enumerate(runs):
        run.mkdir()
        join(run, SweepTask(folder.path, number))
    folder.add(runs[0])
    assert note_end(runs[0], "FAILED") is None
    folder.close()

    again = find(config, "a key")
    assert again is not None
    Run(folder.path).launcher_file.unlink()
    again.open()
    # A trial that ends, before it is added, does not end the sweep with the worst of the trials so far.
    assert note_end(runs[1], "FINISHED") is None
    launcher = Run(folder.path).launcher()
    assert launcher is not None
    assert launcher.pid == psutil.Process().pid
