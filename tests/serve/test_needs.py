"""What a run needs of a machine at least, held against models as they are built."""

from __future__ import annotations

import pytest

from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.models.registry import build_model
from ortlaunch.serve.acts.needs import _weights, needs_of

GIB = 1 << 30
CPU = ["backend=eager", "trainer=ddp", "device=cpu", "launcher.workers_per_node=2"]


@pytest.mark.parametrize(
    "model", ["mlp", "gpt2_nano", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("llama", "bert", "vit"))]
)
def test_the_weights_of_a_model_are_about_those_that_it_has(model: str) -> None:
    config = to_config(compose([f"model={model}", *CPU])).model
    built = sum(parameter.numel() for parameter in build_model(config).parameters())
    assert 0.6 * built <= _weights(config.params) <= 1.4 * built


@pytest.mark.parametrize(
    ("words", "name", "least", "most"),
    [
        ([], "memory", 4.5 * GIB, 6.5 * GIB),  # Twice 124 million weights, each four times in 4 bytes, and the workers.
        ([], "disk", 1.3 * GIB, 3.5 * GIB),  # Two checkpoints, each with three times the weights.
        (["train.batch_size=1000000000"], "memory", 1e15, 1e18),
        (["model.params.n_embd=100000000"], "memory", 1e15, 1e20),
        (
            ["train.checkpoint_every=1", "train.steps=2000000000", "train.keep_checkpoints=1000000000"],
            "disk",
            1e18,
            3e18,
        ),
        (["launcher.workers_per_node=4096"], "cores", 4096, 4096),
        (["launcher.threads=3"], "cores", 6, 6),
        (["trainer=fsdp"], "memory", 2.5 * GIB, 4.5 * GIB),
        (["launcher=slurm"], "cores", 0, 0),
    ],
)
def test_what_a_run_needs(words: list[str], name: str, least: float, most: float) -> None:
    needs = needs_of(to_config(compose(["model=gpt2", *CPU, "train.steps=2000", *words])))
    assert least <= needs.get(name, 0) <= most, needs
