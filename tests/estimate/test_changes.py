"""Changes of workers and trainer that may make a run fit: the same learning, and which one is named."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.compose.prepare import prepared
from ortlaunch.config.load import to_config, to_dict
from ortlaunch.config.neighbours import further_changes, in_words
from ortlaunch.config.schema import Config
from ortlaunch.estimate import command
from tests.support.cli import ortlaunch
from tests.support.nightly import first_in_ci

BASE = ("model=gpt2_nano", "backend=eager")


def config_of(*words: str) -> Config:
    return prepared(to_config(compose([*BASE, *words])), starts=False)


def words_of(*words: str, workers: int, on_gpu: bool = False) -> dict[str, list[str]]:
    config = config_of(*words)
    found = further_changes(config, workers, on_gpu=on_gpu)
    return {kind: [in_words(one, config) for one in changed] for kind, changed in found.items()}


def drawn(seed: int) -> tuple[list[str], int, bool]:
    """The words of a run, its workers on each machine, and whether they are on GPUs."""
    chance = random.Random(seed)
    on_gpu, workers = chance.random() < 0.5, chance.choice([1, 2, 3, 4, 6])
    trainer = chance.choice(["ddp", "deepspeed", "fsdp", *(["single"] if workers == 1 else [])])
    words = [
        *(f"device={'cuda' if on_gpu else 'cpu'}", f"trainer={trainer}", f"launcher.workers_per_node={workers}"),
        *(f"train.batch_size={chance.choice([1, 3, 8])}", f"train.grad_accumulation={chance.choice([1, 2])}"),
        f"train.activation_checkpointing={chance.choice(['true', 'false'])}",
        *([f"trainer.zero_stage={chance.choice([1, 2, 3])}"] if trainer == "deepspeed" else []),
    ]
    return words, workers, on_gpu


@pytest.mark.parametrize("seed", first_in_ci(range(40), 15))
def test_each_change_keeps_the_samples_of_a_step_and_is_what_its_words_compose(seed: int) -> None:
    words, workers, on_gpu = drawn(seed)
    config = config_of(*words)

    def samples(one: Config, count: int) -> int:
        return one.train.batch_size * one.train.grad_accumulation * count

    for changed in [one for kind in further_changes(config, workers, on_gpu=on_gpu).values() for one in kind]:
        said = in_words(changed, config).split()
        keys = [word.partition("=")[0] for word in said]
        assert len(keys) == len(set(keys)) > 0
        kept = [word for word in words if word.partition("=")[0] not in keys]
        if "trainer" in keys:
            kept = [word for word in kept if not word.startswith("trainer.")]
        composed = config_of(*kept, *said)
        assert to_dict(composed) == to_dict(prepared(changed, starts=False))
        assert samples(changed, changed.launcher.workers_per_node or workers) == samples(config, workers)
        assert (changed.optimizer, changed.train.precision) == (config.optimizer, config.train.precision)


def test_what_is_changed_on_a_machine_and_on_gpus() -> None:
    saving = "train.batch_size=1 train.grad_accumulation={} train.activation_checkpointing=true"
    assert words_of("trainer=ddp", "device=cpu", "launcher.workers_per_node=4", workers=4) == {
        "fewer workers": [
            "launcher.workers_per_node=2 train.grad_accumulation=2",
            "trainer=single launcher.workers_per_node=1 train.grad_accumulation=4",
            f"trainer=single launcher.workers_per_node=1 {saving.format(16)}",
        ],
        "ZeRO": [
            *(f"trainer=deepspeed trainer.zero_stage={stage}" for stage in (1, 2, 3)),
            f"trainer=deepspeed trainer.zero_stage=3 {saving.format(4)}",
        ],
    }
    offloaded = "trainer=deepspeed trainer.zero_stage=2 trainer.offload_optimizer=true"
    assert words_of("trainer=single", "device=cuda", "train.batch_size=1", workers=1, on_gpu=True) == {
        "the optimizer on the host": [offloaded, f"{offloaded} train.activation_checkpointing=true"]
    }
    on_host = ("trainer=deepspeed", "trainer.zero_stage=3", "trainer.offload_optimizer=true", "device=cuda")
    assert words_of(*on_host, workers=2, on_gpu=True) == {}
    assert words_of("trainer=single", "device=cpu", workers=1) == {}


def test_bf16_under_deepspeed_is_said_to_be_in_other_tensors() -> None:
    found = words_of("trainer=ddp", "device=cpu", "train.precision=bf16", "train.batch_size=1", workers=2)
    assert found["ZeRO"][0] == "trainer=deepspeed trainer.zero_stage=1 (bf16 in other tensors than under trainer=ddp)"
    assert "(" not in "".join(found["fewer workers"])


@pytest.mark.parametrize(
    ("fitting", "named", "asked"),
    [
        ({"zero1", "zero2", "zero3"}, "trainer=deepspeed trainer.zero_stage=1", 3),
        ({"zero3"}, "trainer=deepspeed trainer.zero_stage=3", 5),
        ({"single", "zero1"}, "trainer=single launcher.workers_per_node=1 train.grad_accumulation=2", 2),
        (
            set(),
            "none of a smaller micro-batch, activation checkpointing, fewer workers and ZeRO is enough",
            2,
        ),
    ],
    ids=["the smallest", "the last", "fewer workers first", "none"],
)
def test_the_smallest_change_that_fits_is_named(
    monkeypatch: pytest.MonkeyPatch, fitting: set[str], named: str, asked: int
) -> None:
    """A rule stands in for the estimate."""
    looked_at = []

    def estimate(config: Config, memory: int | None, *, quick: bool, quiet: bool) -> dict[str, Any]:
        looked_at.append(config)
        trainer: Any = config.trainer
        name = f"zero{trainer.zero_stage}" if trainer.name == "deepspeed" else trainer.name
        if name == "zero2":
            raise RequestError("a step of this configuration fails")
        return {"verdict": "fits" if name in fitting else "tight"}

    monkeypatch.setattr(command, "estimate", estimate)
    config = config_of("trainer=ddp", "device=cpu", "launcher.workers_per_node=2")
    assert command._further_change(config, 2**30, quiet=True) == named
    assert len(looked_at) == asked


def test_a_model_without_checkpointing_may_fit_with_less(monkeypatch: pytest.MonkeyPatch) -> None:
    def estimate(config: Config, memory: int | None, *, quick: bool, quiet: bool) -> dict[str, Any]:
        if config.train.activation_checkpointing:
            raise RequestError("train.activation_checkpointing=true: the model has no support for it")
        return {"verdict": "fits" if config.trainer.name == "single" else "tight"}

    monkeypatch.setattr(command, "estimate", estimate)
    config = config_of("trainer=ddp", "device=cpu", "launcher.workers_per_node=2")
    named = command._further_change(config, 2**30, quiet=True)
    assert named == "trainer=single launcher.workers_per_node=1 train.grad_accumulation=2"


@pytest.mark.nightly
def test_a_run_that_fits_with_one_worker_is_told_so(tmp_path: Path) -> None:
    words = ("model=mlp", "model.params.hidden_dim=1000000", "device=cpu", "backend=eager", "train.batch_size=1")
    result = ortlaunch(tmp_path, "estimate", *words, "launcher.workers_per_node=2", "--memory=3500MiB")
    change = "trainer=single launcher.workers_per_node=1 train.grad_accumulation=2"
    assert f"to make it fit: {change}\n" in result.stdout, result.stdout + result.stderr
    again = ortlaunch(tmp_path, "estimate", *words, *change.split(), "--memory=3500MiB", "--quick")
    assert again.stdout.rstrip().endswith("fits"), again.stdout
