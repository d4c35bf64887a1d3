"""The table of trainers is whole, and what else there is asks it instead of knowing trainers by their classes."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ortlaunch
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.config.trainers import TRAINERS, keys_in_names, kind_in_words, label, trainer_of
from ortlaunch.config.trainers.base import Trainer, loaded
from ortlaunch.trainer.engine import Engine

PACKAGE = Path(ortlaunch.__file__).parent
FACTS = PACKAGE / "config" / "trainers"
ENGINES = PACKAGE / "trainer" / "engines"


@pytest.mark.parametrize("trainer", TRAINERS.values(), ids=list(TRAINERS))
def test_what_a_trainer_names_is_there(trainer: Trainer[Any]) -> None:
    assert issubclass(loaded(trainer.engine), Engine)
    assert callable(loaded(trainer.weights_reader))
    config = to_config(compose([f"trainer={trainer.name}", "backend=eager", "device=cpu"]))
    assert type(config.trainer) is trainer.schema
    assert trainer_of(config.trainer) is trainer
    if trainer.variants is not None:
        assert trainer.variant(config.trainer) in trainer.variants.values


@pytest.mark.parametrize("trainer", TRAINERS.values(), ids=list(TRAINERS))
def test_a_worker_imports_nothing_that_it_does_not_need(trainer: Trainer[Any]) -> None:
    """DeepSpeed's import of MLflow would take 1.3 s of each worker's start; the import works later all the same."""
    script = (
        "import sys; from ortlaunch.config.trainers import TRAINERS as all; "
        f"all['{trainer.name}'].import_packages(); "
        f"assert 'mlflow' not in sys.modules and set(all['{trainer.name}'].packages) <= set(sys.modules); import mlflow"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=200, capture_output=True)


def test_no_module_but_its_own_knows_a_trainer_by_its_class() -> None:
    """Else adding one would cost a change there."""
    own = {f"ortlaunch.config.trainers.{path.stem}" for path in FACTS.glob("*.py")} - {"ortlaunch.config.trainers.base"}
    users = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module in own
    }
    places = {path.relative_to(PACKAGE).as_posix() for path in [FACTS / "__init__.py", *ENGINES.glob("*.py")]}
    assert users, "the search finds nothing any more"
    assert users <= places


def test_a_recorded_trainer_is_called_by_its_variant_too() -> None:
    assert label("deepspeed", {"trainer.zero_stage": "2"}) == "deepspeed z2"
    assert label("deepspeed", {}) == "deepspeed"
    assert label("ddp", {"trainer.zero_stage": "2"}) == "ddp"
    assert label("of another version", {}) == "of another version"
    assert label(None, {}) is None
    assert keys_in_names() == ("trainer.zero_stage",)


def test_a_kind_of_checkpoint_is_told_by_all_who_can_read_it() -> None:
    kind = TRAINERS["ddp"].checkpoint_kind(TRAINERS["ddp"].schema())
    assert kind == "trainer=ddp or trainer=single", "checkpoints of earlier versions have it"
    words = kind_in_words(kind)
    assert words == "trainer=single or trainer=ddp or trainer=fsdp"
    deepspeed = TRAINERS["deepspeed"].checkpoint_kind(TRAINERS["deepspeed"].schema())
    assert kind_in_words(deepspeed) == "trainer=deepspeed trainer.zero_stage=1"
    assert kind_in_words("of another version") == "of another version"
