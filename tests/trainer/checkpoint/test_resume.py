"""What a checkpoint must have in common with the run that goes on from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.config.schema import Config, DataConfig, HfDataConfig, SyntheticConfig, TrainConfig
from ortlaunch.run.checkpoints import Store
from ortlaunch.run.run import Run
from ortlaunch.run.state import FIRST_STEP
from ortlaunch.trainer.checkpoint.resume import (
    Start,
    _check_run,
    _choose,
    check_data,
    kind_of,
    optimizer_of,
    reading_of,
)
from ortlaunch.trainer.workers import Workers

WORKERS = Workers(0, 2, torch.device("cpu"), threads=1)


def goes_on(then: DataConfig, now: DataConfig, samples: int | None, batches: tuple[int, int] = (8, 8)) -> None:
    """Checks a run against a checkpoint of another, with (batch size before, now)."""
    before, after = (
        reading_of(Config(data=data, train=TrainConfig(batch_size=size)), is_numbered=samples is not None)
        for data, size in zip((then, now), batches, strict=True)
    )
    start = Start(Path("here"), {"data": "abc", "samples": samples, "workers": 2, "reading": before})
    check_data(start, "abc", samples, WORKERS, after)


def stream(**keys: object) -> HfDataConfig:
    return HfDataConfig(path="somewhere", streaming=True, **keys)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keys", "batches", "parts"),
    [
        ({"seq_len": 64}, (8, 8), ("data.seq_len=128", "data.seq_len=64")),
        ({"workers": 2}, (8, 8), ("data.workers=0", "data.workers=2")),
        ({"eval_fraction": 0.5}, (8, 8), ("data.eval_fraction=0.02", "data.eval_fraction=0.5")),
        ({"eval_split": "dev"}, (8, 8), ("data.eval_split=null", "data.eval_split=dev")),
        ({}, (8, 4), ("train.batch_size=8", "train.batch_size=4")),
    ],
)
def test_a_stream_that_is_read_otherwise_is_another_place(
    keys: dict[str, object], batches: tuple[int, int], parts: tuple[str, ...]
) -> None:
    """A place in it is a number of batches of one loader: in other batches it is elsewhere, and nobody would see it."""
    with pytest.raises(RequestError) as caught:
        goes_on(stream(), stream(**keys), None, batches)
    assert all(part in str(caught.value) for part in ("here", *parts)), str(caught.value)


def test_what_has_not_changed_and_older_checkpoints_go_on() -> None:
    goes_on(stream(), stream(), None)
    start = Start(Path("here"), {"data": "abc", "samples": None, "workers": 2})
    check_data(start, "abc", None, WORKERS, reading_of(Config(data=stream()), is_numbered=False))


def test_numbered_samples_can_be_read_in_other_batches() -> None:
    goes_on(SyntheticConfig(), SyntheticConfig(workers=3), 100, (8, 4))


def check_run(*words: str, trainer: str = "ddp") -> None:
    """Checks a run against the checkpoint that one with the defaults wrote after 40 steps."""
    same = ("model=mlp", "device=cpu", "backend=eager", f"trainer={trainer}")
    before, after = (to_config(compose([*same, *more])) for more in ((), words))
    facts = {"kind": kind_of(before), "optimizer": optimizer_of(before), "precision": "fp32"}
    facts |= {"workers": 2, "seed": 0, "step": 40}
    _check_run(after, Start(Path("here"), facts), WORKERS)


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("optimizer=sgd", ("optimizer=adamw", "optimizer=sgd", "ortlaunch export weights")),
        ("optimizer.decay_bias_and_norm=true", ("decay_bias_and_norm=false", "decay_bias_and_norm=true")),
        ("optimizer.groups=[{match: '*.bias', frozen: true}]", ("optimizer.groups=[]", "'match': '*.bias'")),
        ("train.steps=39", ("after step 40", "train.steps=39")),
    ],
)
def test_a_state_that_this_run_cannot_use_is_refused(word: str, parts: tuple[str, ...]) -> None:
    """AdamW's state gives SGD no momentum, and SGD's gives AdamW no moments: it would fail in its first step."""
    with pytest.raises(RequestError) as caught:
        check_run(word)
    assert all(part in str(caught.value) for part in ("here", *parts)), str(caught.value)


def test_settings_of_the_same_optimizer_may_change() -> None:
    check_run("optimizer.lr=1", "optimizer.weight_decay=0", "train.steps=40", "train.ema=0.9")


@pytest.mark.parametrize(
    ("target", "change", "is_same"),
    [
        ("torch.optim:NAdam", "optimizer.params.eps=1", True),
        ("torch.optim:NAdam", "optimizer.groups=[{match: '*.bias', weight_decay: 0.1, lr_factor: 3}]", True),
        ("torch.optim:NAdam", "optimizer.groups=[{match: '*.bias'}]", False),
        ("torch.optim:NAdam", "optimizer.target=torch.optim:RAdam", False),
        # Its groups are taken from the checkpoint, for the sake of the state that they may hold.
        ("mine:Own", "optimizer.params.eps=1", False),
    ],
)
def test_what_decides_which_state_an_optimizer_has(target: str, change: str, is_same: bool) -> None:
    groups = "optimizer.groups=[{match: '*.bias', weight_decay: 0.2}]"
    words = ("model=mlp", "optimizer=factory", f"optimizer.target={target}", groups)
    before, after = (to_config(compose([*words, *more])).optimizer for more in ((), (change,)))
    assert (before.state_facts() == after.state_facts()) is is_same


def test_the_precision_may_change_unless_the_state_depends_on_it() -> None:
    """DeepSpeed takes the loss scale from the checkpoint, which is 1 in fp32 and would lose gradients in fp16."""
    check_run("train.precision=fp16")
    with pytest.raises(RequestError, match=r"train\.precision=fp32.*train\.precision=fp16"):
        check_run("train.precision=fp16", trainer="deepspeed")


@pytest.mark.parametrize(
    ("wanted", "attempt", "trains", "chosen", "abandoned"),
    [
        ("auto", 0, False, 30, []),
        ("never", 0, False, None, [30, 20, 10]),
        ("never", 1, True, 30, []),
        ("never", 1, False, None, [30, 20, 10]),
        ("RUN/checkpoints/step-00000010", 0, False, 10, [30, 20]),
        ("RUN/checkpoints/step-00000010", 1, True, 30, []),
        ("RUN/checkpoints/step-00000010", 1, False, 10, [30, 20]),
        ("RUN", 0, False, 30, []),
        ("OTHER", 0, False, 5, [30, 20, 10]),
        ("OTHER/checkpoints/step-00000005", 0, False, 5, [30, 20, 10]),
        ("OTHER", 1, True, 30, []),
    ],
)
def test_the_choice_of_a_checkpoint_changes_no_file(
    tmp_path: Path, wanted: str, attempt: int, trains: bool, chosen: int | None, abandoned: list[int]
) -> None:
    """`never` and a path hold until a step is made: later attempts go on from what the run has saved since.

    What the run has saved from another beginning would be newer than all that it saves now: it is left behind.
    """
    run, other = Run(tmp_path / "run"), Run(tmp_path / "other")
    paths = {}
    for step, owner in ((10, run), (20, run), (30, run), (5, other)):
        store = Store(owner.checkpoints, keep=3)
        store.begin(step)
        paths[step] = store.commit(step, {"step": step})
    with run.journal() as journal:
        journal.start("e", "n", "aaaaaa")
        if trains:
            journal.metrics(0, {FIRST_STEP: 1.0})
    before = sorted(tmp_path.rglob("*"))
    resume = wanted.replace("RUN", str(run.path)).replace("OTHER", str(other.path))
    choice = _choose(Config(train=TrainConfig(resume=resume)), run.path, attempt)
    assert choice.path == (None if chosen is None else paths[chosen]) and not choice.error
    assert choice.abandoned == [paths[step] for step in abandoned]
    assert sorted(tmp_path.rglob("*")) == before
