"""The backends that a run with ``backend=auto`` may have."""

from __future__ import annotations

import pytest

from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config import candidates
from ortlaunch.config.load import to_config
from ortlaunch.config.schema import Config
from tests.support.ort import pretend_no_ort

WORDS = ("model=mlp", "device=cpu")


def config_of(*words: str) -> Config:
    return to_config(compose([*WORDS, *words]))


def names(config: Config) -> list[str]:
    return [one.backend.name for one in candidates.possible(config)]


def test_what_cannot_run_by_the_rules_is_no_candidate() -> None:
    plain, sharded = config_of("backend=auto"), config_of("backend=auto", "trainer=fsdp")
    assert candidates.refused(plain) == {}
    assert names(plain) == ["eager", "compile", "ort"]
    assert candidates.refused(sharded) == {"ort": "backend=ort does not go with trainer=fsdp"}
    assert names(sharded) == ["eager", "compile"]


def test_a_package_is_missing_only_where_the_workers_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_no_ort(monkeypatch)
    plain = config_of("backend=auto")
    assert candidates.refused(plain)["ort"] == "it needs onnxruntime-training, which is not here"
    assert names(plain) == ["eager", "compile"]
    # The nodes of a cluster may have it.
    assert names(config_of("backend=auto", "launcher=slurm")) == ["eager", "compile", "ort"]


def test_a_backend_that_was_named_is_the_only_one() -> None:
    chosen = config_of("backend=eager")
    assert candidates.possible(chosen) == (chosen,)
