"""What an export is asked for."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import save_config, to_config
from ortlaunch.export.command import _libraries_quiet
from ortlaunch.export.request import OWN_KEYS, parse

FLAGS = {"force": False, "prefix": True}


def asked(*arguments: str, keys: tuple[str, ...] = OWN_KEYS):
    return parse("artifacts", list(arguments), keys, FLAGS)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run folder as a launcher leaves it at the start."""
    folder = tmp_path / "run"
    folder.mkdir()
    save_config(to_config(compose(["model=mlp", "model.params.hidden_dim=32", "device=cpu"])), folder / "config.yaml")
    (folder / "journal.jsonl").touch()
    return folder


def test_keys_flags_and_the_configuration() -> None:
    request = asked("model=resnet", "--force", "out=there", "trainable=head.*,tail", "--prefix", "p_", "optimizer=sgd")
    assert (request.config.model.name, request.config.data.name) == ("resnet", "digits")
    assert request.config.optimizer.name == "sgd"
    assert request.out == Path.cwd() / "there"
    assert request.trainable == ("head.*", "tail")
    assert request.has("force") and request.options["prefix"] == "p_"
    assert asked("out=x", "--prefix=q").options["prefix"] == "q"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["model=mlp"], ["out=FOLDER"]),
        (["out=x", "model"], ["model is not of the form"]),
        (["out=x", "--forse"], ["no option --forse"]),
        (["out=x", "--prefix"], ["--prefix needs a value"]),
        (["out=x", "--force=yes"], ["--force takes no value"]),
        (["out="], ["out= is empty"]),
        (["out=x", "loss=hinge"], ["loss=hinge", "cross_entropy"]),
        (["out=x", "from_run=nowhere"], ["from_run=nowhere", "no run"]),
        (["out=x", "from_run=a", "from_weights=b"], ["drop one"]),
        (["out=x", "model=mpl"], ["mpl", "model=mlp"]),
        (["out=x", "train.stpes=3"], ["train.stpes"]),
        (["out=x", "model=mlp", "data=pysource"], ["takes images"]),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], words: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        asked(*arguments)
    for word in words:
        assert word in str(caught.value)


def test_a_key_of_another_export_is_refused() -> None:
    with pytest.raises(RequestError, match="trainable= is not for this export"):
        asked("out=x", "trainable=*", keys=("out",))


def test_a_run_brings_its_model_and_data(run_dir: Path) -> None:
    request = asked(f"from_run={run_dir}", "out=x", "optimizer.lr=0.5", "model=mlp")
    assert request.from_run == run_dir
    assert request.config.model.params["hidden_dim"] == 32
    assert request.config.optimizer.lr == 0.5
    other = asked(f"from_run={run_dir}", "out=x", "optimizer=sgd", "optimizer.momentum=0")
    assert (other.config.optimizer.name, other.config.optimizer.momentum) == ("sgd", 0.0)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model=resnet", ["model=resnet", "the run has model=mlp"]),
        ("trainer=ddp", ["trainer=ddp"]),
        ("optimizer=sdg", ["optimizer=sdg", "adamw"]),
        ("optimizer.rate=1", ["rate"]),
    ],
)
def test_what_a_run_has_settled_stays(run_dir: Path, override: str, words: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        asked(f"from_run={run_dir}", "out=x", override)
    for word in words:
        assert word in str(caught.value)


def test_neither_run_nor_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="neither a run folder nor a checkpoint"):
        asked(f"from_run={tmp_path}", "out=x")


def test_a_run_of_another_machine_can_be_exported(run_dir: Path) -> None:
    """What a GPU, or weights that are gone, were needed for is over."""
    text = (run_dir / "config.yaml").read_text()
    for old, new in (
        ("device: cpu", "device: cuda"),
        ("precision: fp32", "precision: bf16"),
        ("weights: null", "weights: gone"),
    ):
        assert old in text
        text = text.replace(old, new)
    (run_dir / "config.yaml").write_text(text)
    assert asked(f"from_run={run_dir}", "out=x").config.model.name == "mlp"


def test_torchs_word_on_reading_a_checkpoint_in_one_process_stays_off_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("TRANSFORMERS_VERBOSITY", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with _libraries_quiet():
            warnings.warn("torch.distributed is disabled, unavailable or uninitialized, assuming …", stacklevel=1)
            warnings.warn("another", stacklevel=1)
    assert [str(one.message) for one in caught] == ["another"]
