"""Keys that are changed when a run goes on: read as those of a run are, and refused in the same words."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.config.schema import Config, Precision, SlurmConfig
from ortlaunch.verbs.resume import _changed


@pytest.fixture(scope="module")
def stored() -> Config:
    return to_config(compose(["model=mlp", "backend=eager", "launcher=slurm", "device=cpu"]))


def test_values_are_what_they_are_on_the_command_line_of_a_run(stored: Config, tmp_path: Path) -> None:
    """YAML would take the time for 14400, and SLURM that for minutes."""
    words = [
        "launcher.time=4:00:00",
        "optimizer.lr=1e-4",
        "train.precision=bf16",
        "name='a, b'",
        "launcher.memory=null",
    ]
    config = _changed(stored, [*words, "+model.params.width=3", "+launcher.env.NCCL_DEBUG=INFO"], tmp_path)
    assert isinstance(config.launcher, SlurmConfig)
    assert (config.launcher.time, config.launcher.memory) == ("4:00:00", None)
    assert (config.optimizer.lr, config.train.precision, config.name) == (1e-4, Precision.bf16, "a, b")
    assert config.model.params["width"] == 3 and config.launcher.env == {"NCCL_DEBUG": "INFO"}


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("train.stpes=5", "train.stpes: no such key. Did you mean train.steps"),
        ("launcher.master_port=1", "the chosen launcher has no such key; it belongs to launcher=local"),
        ("train.steps=many", "train.steps"),
        ("train.steps=1,2", "one value"),
        ("name=[a", "name=[a: not understood"),
        ("launcher=local", "a run keeps what it is made of"),
        ("model=gpt2", "a run keeps what it is made of"),
        ("train.steps", "KEY=VALUE"),
        ("~train.steps=5", "KEY=VALUE"),
    ],
)
def test_what_cannot_be_changed_is_said_with_its_key(stored: Config, tmp_path: Path, word: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        _changed(stored, [word], tmp_path)
    message = str(caught.value)
    assert message.startswith("resume: ") and said in message and "\n" not in message
