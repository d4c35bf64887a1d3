"""Weights that are read into a plain model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.export import run_weights as export
from ortlaunch.trainer.checkpoint.saver import ENGINE
from ortlaunch.trainer.weights import FILE, load_weights, save_weights


def test_a_file_that_is_no_safetensors_is_named_with_its_key(tmp_path: Path) -> None:
    """As torch's own files, which people have, too."""
    model = nn.Linear(2, 2)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(RequestError, match=r"^model\.weights=.*pytorch_model\.bin cannot be read as safetensors"):
        load_weights(model, tmp_path / "pytorch_model.bin")


def test_a_part_that_the_index_names_and_the_folder_lacks_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"weight": "part-1.safetensors"}}')
    with pytest.raises(RequestError, match=r"^from_weights=.*part-1\.safetensors cannot be read"):
        load_weights(nn.Linear(2, 2), tmp_path, "from_weights")


@pytest.mark.parametrize(
    ("index", "why"),
    [("no JSON", "cannot be read: Expecting value"), ('{"metadata": {}}', "no weight_map"), ("[1]", "no weight_map")],
)
def test_a_damaged_index_is_named(tmp_path: Path, index: str, why: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(RequestError, match=rf"^model\.weights=.*: model\.safetensors\.index\.json .*{why}"):
        load_weights(nn.Linear(2, 2), tmp_path)


def test_counters_are_still_integers_after_deepspeed_has_read_them(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model(torch.rand(4, 3))
    folder = tmp_path / ENGINE / "deepspeed"
    folder.mkdir(parents=True)
    torch.save({"module": model.state_dict()}, folder / "mp_rank_00_model_states.pt")
    config = to_config(compose(["model=mlp", "trainer=deepspeed", "trainer.zero_stage=0"]))
    found = export.weights_in(tmp_path, config, model)
    for name, value in model.state_dict().items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


class Adapted(nn.Linear):
    """As peft's models, which write what they have added and nothing else."""

    def save_pretrained(self, folder: Path, **_: object) -> None:
        (folder / "adapter_config.json").write_text("{}")


def test_a_model_with_a_save_pretrained_that_is_not_transformers_keeps_all_its_weights(tmp_path: Path) -> None:
    model, read = Adapted(2, 2), Adapted(2, 2)
    save_weights(dict(model.state_dict()), model, tmp_path / "weights")
    load_weights(read, tmp_path / "weights")
    torch.testing.assert_close(read.state_dict(), model.state_dict())


@pytest.mark.parametrize(("out", "words"), [("out", "out is not empty"), ("/proc/x", "x cannot be made: No such file")])
def test_a_folder_that_cannot_be_used_is_the_users_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, words: str
) -> None:
    (tmp_path / "out").touch()
    monkeypatch.setattr(export, "run_or_folder", lambda _: tmp_path)
    monkeypatch.setattr(export, "_checkpoint", lambda _: tmp_path / "run" / "checkpoints" / "step-00000001")
    monkeypatch.setattr(export, "load_config", lambda _: None)
    with pytest.raises(RequestError, match=words):
        export.export_weights(["run", "--out", str(tmp_path / out)])


@pytest.mark.parametrize("has_notes", [False, True])
def test_weights_that_are_written_again_cost_nobody_a_file(tmp_path: Path, has_notes: bool) -> None:
    """`ortlaunch resume RUN train.steps=MORE` writes them where those of the first end are."""
    folder = tmp_path / "weights"
    for value in (1.0, 2.0):
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, value)
        save_weights(dict(model.state_dict()), model, folder)
        if has_notes and value == 1.0:
            (folder / "notes.txt").write_text("mine")
    found = nn.Linear(2, 2)
    load_weights(found, folder)
    assert bool((found.weight == 2.0).all())
    assert [one.name for one in folder.iterdir()] == [FILE]
    aside = tmp_path / "weights.aside-1"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["weights", *([aside.name] if has_notes else [])]
    assert not has_notes or (aside / "notes.txt").read_text() == "mine"
