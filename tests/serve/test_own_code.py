"""Which key of a run makes it an author's to go on with."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import save_config, to_config
from ortlaunch.config.schema import ScriptRun
from ortlaunch.run import manifest
from ortlaunch.run.run import Run
from ortlaunch.serve.acts.composing import own_code_in
from ortlaunch.serve.acts.runs import export_weights

SLURM = ["launcher=slurm", "launcher/slurm_profile=lab"]


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["train.steps=3", "launcher.run=20260101-120000-abcdef", "launcher.timeout_seconds=9"], ""),
        ([*SLURM, "launcher.partition=slow", "launcher.memory=8G"], ""),
        (["model.imports=[mine]"], "model.imports"),
        (["model=factory", "model.target=mine:make"], "model.target"),
        ([*SLURM, "launcher.setup=[module load cuda, make]"], "launcher.setup"),
        ([*SLURM, "launcher.container.image=mine.sif"], "launcher.container.image"),
        ([*SLURM, "launcher.container.mounts=[/home:/home]"], "launcher.container.mounts"),
        ([*SLURM, "launcher.python=/home/mine/python"], "launcher.python"),
        ([*SLURM, "launcher.extra=['--container-image=mine']"], "launcher.extra"),
        ([*SLURM, "+launcher.env.LD_PRELOAD=mine.so"], "launcher.env.LD_PRELOAD"),
    ],
)
def test_what_executes_an_authors_choice_is_named_and_a_profile_is_the_administrators(
    words: list[str], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = {"setup": ["module load cuda"], "container": {"image": "lab.sif"}, "env": {"LAB": "1"}}
    (tmp_path / "lab.yaml").write_text(yaml.safe_dump(lab))
    monkeypatch.setenv("ORTLAUNCH_SLURM_PROFILES", str(tmp_path))
    run = Run(tmp_path / "run")
    run.path.mkdir()
    run.overrides_file.write_text(yaml.safe_dump(["run", *words]))
    assert own_code_in(run, to_config(compose(words))) == key
    assert own_code_in(run, ScriptRun()) == "script.command", "a script is always an author's"


@pytest.mark.parametrize(
    ("words", "is_author", "said"),
    [
        (["model=factory", "model.target=mine:make"], False, "model.target of this run is code of an author's"),
        (["model=factory", "model.target=mine:make"], True, "there is no complete checkpoint"),
        (["model=mlp"], False, "there is no complete checkpoint"),
    ],
)
def test_the_weights_of_a_model_of_ones_own_are_exported_by_authors_alone(
    words: list[str], is_author: bool, said: str, tmp_path: Path
) -> None:
    """The model is built for it. The checkpoint here is damaged, which is found out afterwards."""
    run = Run(tmp_path / "runs" / "e" / "20260101-120000-x-abcdef")
    checkpoint = run.checkpoints / "step-00000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / manifest.NAME).write_text("damaged")
    save_config(to_config(compose(words)), run.config_file)
    run.overrides_file.write_text(yaml.safe_dump(words))
    with pytest.raises(RequestError, match=said):
        export_weights({"root": str(tmp_path / "runs"), "run_dir": str(run.path), "is_author": is_author})
