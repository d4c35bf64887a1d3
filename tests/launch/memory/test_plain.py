"""The bound by which runs that fit plainly are not asked about, beside what is traced."""

from __future__ import annotations

from typing import Any

import pytest

from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.config.schema import Config
from ortlaunch.launch.memory.band import LOADER
from ortlaunch.launch.memory.plain import PROCESS, bound
from tests.support.nightly import first_in_ci

GIB = 2**30
PLAIN = ("backend=eager", "device=cpu", "trainer=single")


def config_of(*words: str) -> Config:
    return to_config(compose([*PLAIN, *words]))


@pytest.mark.parametrize("model", ["mlp", "gpt2_nano", "resnet", "vit"])
def test_small_models_need_no_question_on_a_machine_of_ordinary_size(model: str) -> None:
    found = bound(config_of(f"model={model}", "backend=ort"), 2)
    assert found is not None
    assert found < 4 * GIB


@pytest.mark.parametrize(
    "words",
    [
        ("model=factory", "model.target=nets:Net"),
        ("model=hf", "model.params.pretrained=folder"),
        ("model=mlp", "model.weights=folder"),
        ("model=gpt2_nano", "+model.params.n_inner=100000"),
        ("model=gpt2_nano", "model.params.n_embd=many"),
        ("model=gpt2_nano", "data=text", "data.path=file"),
        ("model=mlp", "+profile=memory"),
    ],
    ids=lambda words: " ".join(words),
)
def test_what_the_keys_do_not_tell_has_no_bound(words: tuple[str, ...]) -> None:
    assert bound(config_of(*words), 1) is None


def test_the_bound_grows_with_the_images() -> None:
    small, large = (bound(config_of("model=resnet", f"data.image_size={size}"), 1) for size in (8, 512))
    assert small is not None and large is not None
    # The 1,797 images alone, which every worker holds.
    assert large - small > 4 * 1797 * 512 * 512


def test_the_bound_grows_with_the_loader_processes() -> None:
    none, four = (bound(config_of("model=mlp", f"data.workers={count}"), 2) for count in (0, 4))
    assert none is not None and four is not None
    # They keep a copy of what their worker has changed.
    assert four - none == 2 * (PROCESS // 2 + 4 * LOADER)


CASES = (
    ("model=mlp", "model.params.hidden_dim=65536", "train.batch_size=1"),
    ("model=gpt2_nano", "train.batch_size=16"),
    ("model=gpt2_nano", "train.batch_size=8", "data.seq_len=512"),
    ("model=llama", "data.seq_len=256"),
    ("model=gpt2", "train.batch_size=2"),
    ("model=bert", "data=synthetic", "train.batch_size=8"),
    ("model=resnet", "train.batch_size=256"),
    ("model=resnet", "train.batch_size=64", "data.image_size=128"),
    ("model=vit", "train.batch_size=256"),
)


@pytest.mark.parametrize(
    "words",
    first_in_ci(CASES, 1),
    ids=lambda words: " ".join(words),
)
def test_a_trace_stays_below_the_bound(words: tuple[str, ...]) -> None:
    import torch

    from ortlaunch.estimate.trace import shapes_of, trace
    from ortlaunch.trainer.prepare import open_loader
    from ortlaunch.trainer.workers import Workers

    config = config_of(*words)
    worker = Workers(0, 1, torch.device("cpu"), 1)
    shapes: Any = shapes_of(next(iter(open_loader(config, worker))), config.train.batch_size)
    phases = trace(config, worker, shapes).phases.values()
    most = bound(config, 1)
    assert most is not None
    # What a process holds beside its tensors is in the bound too.
    assert max(use.process for use in phases) < most - PROCESS
