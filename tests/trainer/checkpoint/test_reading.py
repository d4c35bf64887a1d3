"""A checkpoint that another user has made: no file of it runs code, and what is wrong with it is one line."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from ortlaunch.base import unpickling
from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import Config, TrainConfig
from ortlaunch.run.checkpoints import Store
from ortlaunch.trainer.checkpoint import reading
from ortlaunch.trainer.checkpoint.resume import find
from ortlaunch.trainer.checkpoint.torch_state import read_tensors
from ortlaunch.trainer.workers import Workers
from tests.support.users import give_away, needs_root


class Attack:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """The folder of a snapshot."""
    tensors = {"model/weight": torch.arange(6.0).reshape(2, 3), "model/half": torch.ones(2, dtype=torch.bfloat16)}
    save(tensors, storage_writer=FileSystemWriter(tmp_path / "engine" / "tensors"))
    return tmp_path / "engine"


@pytest.fixture
def proof(tmp_path: Path) -> Path:
    """What an attack makes."""
    return tmp_path / "attacked"


def change(stored: Path, edit: Any) -> None:
    """Changes the metadata of a snapshot."""
    path = stored / "tensors" / ".metadata"
    meta = pickle.loads(path.read_bytes())
    edit(meta)
    path.write_bytes(pickle.dumps(meta))


def test_a_snapshot_is_read(stored: Path) -> None:
    tensors = read_tensors(stored, None)
    assert torch.equal(tensors["model/weight"], torch.arange(6.0).reshape(2, 3))
    assert torch.equal(tensors["model/half"], torch.ones(2, dtype=torch.bfloat16))


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_metadata_file_runs_no_code(stored: Path, proof: Path, protocol: int) -> None:
    path = stored / "tensors" / ".metadata"
    path.write_bytes(pickle.dumps(Attack(proof), protocol=protocol))
    with pytest.raises(RequestError, match=re.escape(f"{path} is not read") + ".*it names posix.mkdir, which no such"):
        read_tensors(stored, None)
    assert not proof.exists()


def test_an_attack_inside_of_real_metadata_runs_no_code(stored: Path, proof: Path) -> None:
    change(stored, lambda meta: setattr(meta, "planner_data", Attack(proof)))
    with pytest.raises(RequestError, match=r"posix.mkdir"):
        read_tensors(stored, None)
    assert not proof.exists()


@pytest.mark.parametrize("name", ["Metadata.__init__.__globals__", "load", "_utils"])
def test_no_further_name_is_reached_through_a_known_module(name: str) -> None:
    for module in ("torch.distributed.checkpoint.metadata", "torch"):
        assert reading._known_of_metadata(module, name) is None
    content = b"\x80\x04\x8c\x05torch\x8c" + bytes([len(name)]) + name.encode() + b"\x93."
    with pytest.raises(unpickling.UnknownNameError):
        unpickling.loads(content, reading._known_of_metadata)


def set_place(meta: Any, place: str) -> None:
    for info in meta.storage_data.values():
        info.relative_path = place


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda meta: set_place(meta, "../../other"), "outside the folder"),
        (lambda meta: set_place(meta, "/etc/hostname"), "outside the folder"),
        (lambda meta: set_place(meta, "fifo"), "it is a FIFO and no plain file"),
        (
            lambda meta: setattr(meta.state_dict_metadata["model/weight"], "size", torch.Size([1 << 40, 1 << 10])),
            "model/weight would have",
        ),
        (lambda meta: setattr(meta, "state_dict_metadata", 5), "cannot be read"),
    ],
)
def test_metadata_that_describes_something_else(stored: Path, edit: Any, why: str) -> None:
    os.mkfifo(stored / "tensors" / "fifo")
    change(stored, edit)
    with pytest.raises(RequestError, match=re.escape(why)) as caught:
        read_tensors(stored, None)
    assert str(stored / "tensors" / ".metadata") in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_of_torch_runs_no_code(tmp_path: Path, proof: Path) -> None:
    path = tmp_path / "rest.pt"
    torch.save({"groups": Attack(proof)}, path)
    with pytest.raises(RequestError, match=re.escape(f"{path} is not read") + ".*it names posix.mkdir"):
        reading.load(path)
    path.write_bytes(b"no zip")
    with pytest.raises(RequestError, match=re.escape(str(path))):
        reading.load(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RequestError, match="FIFO"):
        reading.load(path)
    assert not proof.exists()


def test_a_file_of_deepspeed_runs_no_code(tmp_path: Path, proof: Path) -> None:
    """Its own code asks torch to run whatever a file holds."""
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    path = tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    usual = {"address": fragment_address(numel=3, start=1), "stage": ZeroStageEnum(2), "scaler": LossScaler(2.0)}
    torch.save(usual, path)
    found = reading.load_deepspeed(path)
    assert (found["address"], found["stage"], found["scaler"].cur_scale) == (usual["address"], usual["stage"], 2.0)
    with reading.deepspeed_classes(path):
        assert torch.load(path, weights_only=False)["stage"] == usual["stage"]
    torch.save(usual | {"attack": Attack(proof)}, path)
    with pytest.raises(RequestError, match=r"it names posix.mkdir, which no checkpoint has"):
        reading.load_deepspeed(path)
    with pytest.raises(RequestError, match=r"it names posix.mkdir"), reading.deepspeed_classes(path):
        torch.load(path, weights_only=False)
    assert not proof.exists()
    assert reading._FORCED not in os.environ


def test_no_other_module_reads_pickles() -> None:
    """Every call that could run what a file holds is in the modules that prevent it."""
    package = Path(reading.__file__).parents[2]
    calls = re.compile(
        r"pickle\.loads?\(|torch\.load\(|weights_only=False|yaml\.(unsafe_|full_)?load\(|Unpickler|FileSystemReader\("
    )
    found = {
        file.relative_to(package).as_posix(): set(matches)
        for file in package.rglob("*.py")
        if (matches := calls.findall(file.read_text()))
    }
    assert set(found) == {"base/unpickling.py", "trainer/checkpoint/reading.py", "run/settings.py", "data/reading.py"}


@needs_root
def test_a_checkpoint_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "foreign" / "checkpoints", keep=1)
    store.begin(4)
    give_away(store.commit(4, {}))
    config = Config(train=TrainConfig(resume=str(store.folder.parent)))
    monkeypatch.setattr("torch.distributed.broadcast_object_list", lambda *_, **__: None)
    with pytest.raises(RequestError, match=r"train.resume: .*step-00000004 belongs to the user nobody"):
        find(config, tmp_path / "mine", Workers(0, 1, torch.device("cpu"), threads=1), None, attempt=0)  # type: ignore[arg-type]
