"""Memory by trials: what is left of a run in them, which micro-batches they take, and where none are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.config.schema import Config
from ortlaunch.estimate import trials
from ortlaunch.estimate.request import Request
from ortlaunch.estimate.trials import few_steps, untraced, with_trials
from ortlaunch.launch.trial import Outcome

HERE = Request(1, 1, None, "", quick=False)


def config_of(*words: str) -> Config:
    return to_config(compose(["model=gpt2_nano", "trainer=single", "backend=ort", "device=cpu", *words]))


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        # Of several copies the memory stays, of a single one not; the last checkpoint is no copy.
        (["train.checkpoint_every=2000", "train.eval_every=500"], (6, 2, 2, 3)),
        (["train.checkpoint_every=6000"], (6, 4, None, 3)),
        (["train.checkpoint_every=10000", "train.eval_every=10000"], (6, 6, 6, 3)),
        (["train.checkpoint_every=null", "backend.recheck_every=0"], (6, None, None, 0)),
        (["train.steps=3", "train.checkpoint_every=2", "train.eval_every=3"], (3, 2, 3, 0)),
        (["train.steps=1"], (2, 1000, None, 0)),
    ],
)
def test_a_trial_has_what_the_memory_of_the_whole_run_depends_on(words: list[str], kept: tuple[Any, ...]) -> None:
    found = few_steps(config_of("train.steps=10000", *words), 3)
    train = found.train
    backend: Any = found.backend
    assert (train.steps, train.checkpoint_every, train.eval_every, backend.recheck_every) == kept
    assert (train.batch_size, train.save_weights, backend.export_cache) == (3, True, False)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], Outcome]], list[int]]:
    """Lets a rule stand in for the trials; returns the micro-batches that are tried."""

    def by(rule: Callable[[int], Outcome]) -> list[int]:
        sizes: list[int] = []

        def trial(config: Config, *_: Any, **__: Any) -> Outcome:
            sizes.append(config.train.batch_size)
            return rule(config.train.batch_size)

        monkeypatch.setattr(trials, "tried", trial)
        return sizes

    return by


def of_bytes(size: int) -> Outcome:
    return Outcome("ok", 1.0, rate=1.0, worker_bytes=100 * size)


@pytest.mark.parametrize(
    ("size", "most", "least", "sizes"),
    [(16, 999, 1, [16, 8]), (1, 999, 1, [2, 1]), (64, 20, 1, [64, 32, 16, 8]), (3, 999, 2, [3, 1, 6])],
    ids=["half", "one sample", "too large", "batch normalization"],
)
def test_two_micro_batches_are_tried(tried: Any, size: int, most: int, least: int, sizes: list[int]) -> None:
    def rule(size: int) -> Outcome:
        if size > most:
            return Outcome("out of memory", 1.0, reason="too large")
        return of_bytes(size) if size >= least else Outcome("refused", 1.0, reason="more than 1 value per channel")

    seen = tried(rule)
    found = with_trials(HERE, config_of(f"train.batch_size={size}"), quiet=True)
    assert seen == sizes
    assert found.tried == {"ort": [(one, 100 * one) for one in sizes[-2:] if one >= least]} or size == 3


def test_why_a_trial_failed_is_told(tried: Any) -> None:
    tried(lambda _size: Outcome("refused", 1.0, reason="no such layer"))
    assert (
        with_trials(HERE, config_of(), quiet=True).why_untried
        == "and a trial of it failed (micro-batch 4: no such layer)"
    )
    with pytest.raises(RequestError, match=r"\(an item\), and a trial of it failed: micro-batch 4: no such layer"):
        untraced(HERE, config_of(), "an item", quiet=True)


@pytest.mark.parametrize(
    ("asked", "words", "why"),
    [
        (replace(HERE, quick=True), [], "which --quick leaves out"),
        (replace(HERE, nodes=2), ["trainer=ddp", "launcher.nodes=2"], "which are taken for runs on this machine alone"),
        (HERE, ["launcher=slurm"], "which are taken for runs on this machine alone"),
        (replace(HERE, on_gpu=True, workers=99), [], "and this machine lacks the GPUs for them"),
    ],
    ids=["quick", "nodes", "slurm", "gpu"],
)
def test_where_no_trial_can_be_made_a_clause_says_why(tried: Any, asked: Request, words: list[str], why: str) -> None:
    seen = tried(of_bytes)
    config = config_of(*words)
    assert with_trials(asked, config, quiet=True).why_untried == why
    with pytest.raises(RequestError, match=f"its memory is not known without real steps, {why}"):
        untraced(asked, config, "an item", quiet=True)
    assert seen == []


def test_eager_pytorch_is_not_tried(tried: Any) -> None:
    assert with_trials(HERE, config_of("backend=eager"), quiet=True) == HERE
    seen = tried(of_bytes)
    assert with_trials(replace(HERE, quick=True), config_of("backend=eager"), quiet=True).why_untried == ""
    assert seen == []
