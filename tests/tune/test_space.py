"""The cells around a configuration: same learning, held axes, freed ones, and what is refused."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.compose.hydra_tree import compose
from ortlaunch.compose.prepare import prepared
from ortlaunch.config import devices
from ortlaunch.config.load import to_config, to_dict
from ortlaunch.config.schema import Config
from ortlaunch.tune.space import CHECKPOINTING, MICRO, OFF, ON, TRAINER, WORKERS, Space
from tests.support.cli import answer
from tests.support.ort import pretend_ort

BASE = ("model=mlp", "device=cpu", "launcher.workers_per_node=1,2", "train.batch_size=6", "train.grad_accumulation=2")
ZERO = {"deepspeed-z0", "deepspeed-z1", "deepspeed-z2", "deepspeed-z3"}


def space(*words: str, free: tuple[str, ...] = (), hold: tuple[str, ...] = ()) -> Space:
    return Space([*BASE, *words], free, hold)


def values(found: Space, axis: str) -> set[Any]:
    return {cell[axis] for cell in found.cells}


def composed(found: Space, number: int) -> Config:
    """What the command of a cell composes to."""
    return prepared(to_config(compose(shlex.split(found.command(found.cells[number]))[1:])))


def test_every_cell_keeps_the_global_batch_precision_and_optimizer() -> None:
    found = space("backend=eager", "train.activation_checkpointing=false")
    assert found.batch == 12
    for cell in found.cells:
        config = found.configured(cell)
        workers = config.launcher.workers_per_node
        assert workers is not None
        assert config.train.batch_size * config.train.grad_accumulation * workers == 12
        assert (config.train.precision, config.optimizer) == (found.asked.train.precision, found.asked.optimizer)
    assert values(found, MICRO) == {12, 6, 3, 1}
    assert values(found, WORKERS) == {1, 2}
    assert values(found, TRAINER) == {"single", "ddp", "fsdp"} | ZERO


def test_without_a_list_five_axes_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_ort(monkeypatch)
    found = Space(["model=gpt2", "device=cpu"])
    assert list(dict(found.cell.values)) == ["backend", "trainer", WORKERS, MICRO, CHECKPOINTING]
    assert values(found, "backend") == {"eager", "compile", "ort"}
    assert values(found, CHECKPOINTING) == {OFF, ON}


def test_a_number_of_workers_that_is_given_twice_is_searched_once() -> None:
    found = space("backend=eager", "trainer=ddp", "launcher.workers_per_node=2,2,null")
    assert len(found.cells) == len(set(found.cells)) > 0


@pytest.mark.parametrize(
    ("words", "free"),
    [
        (("trainer=single,deepspeed", "trainer.zero_stage=2", "data.eval_fraction=0.1"), ()),
        (("trainer=fsdp", "trainer.reshard_after_forward=true,false", "launcher.threads=null,1"), ()),
        (("trainer=ddp", "launcher.allocator=system,keep", "optimizer=adamw,sgd"), ("optimizer",)),
        (("trainer=single", "train.precision=fp32,bf16", "train.batch_size=2,4"), ("train.precision", MICRO)),
    ],
    ids=lambda value: " ".join(value),
)
def test_the_command_of_a_cell_composes_its_configuration(words: tuple[str, ...], free: tuple[str, ...]) -> None:
    found = space("backend=eager,compile", *words, free=free)
    for number in range(0, len(found.cells), max(1, len(found.cells) // 4)):
        assert to_dict(composed(found, number)) == to_dict(found.configured(found.cells[number])), number


@pytest.mark.parametrize(
    ("words", "axis", "left"),
    [
        (["backend=eager", "trainer=single"], "backend", {"eager"}),
        (["backend=compile,eager", "trainer=single"], "backend", {"compile", "eager"}),
        (["trainer=ddp"], "trainer", {"ddp"}),
        (["trainer=ddp", "trainer.bucket_cap_mb=50"], "trainer", {"ddp"}),
        (["trainer=ddp,deepspeed", "trainer.zero_stage=1,2"], "trainer", {"ddp", "deepspeed-z1", "deepspeed-z2"}),
        (["trainer.zero_stage=1,2"], "trainer", {"deepspeed-z1", "deepspeed-z2"}),
        (["train.activation_checkpointing=true", "trainer=single"], CHECKPOINTING, {ON}),
        (["backend=compile", "backend.mode=default", "trainer=single"], "backend", {"compile"}),
        (["trainer=ddp", "trainer.bucket_cap_mb=25,100"], "trainer.bucket_cap_mb", {"25", "100"}),
        (["trainer=single", "launcher.threads=1,2"], "launcher.threads", {"1", "2"}),
        (["trainer=single", "data.workers=0,1"], "data.workers", {"0", "1"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_key_holds_its_axis_and_a_list_is_one(words: list[str], axis: str, left: set[str]) -> None:
    plain = [] if words[0].startswith("backend") else ["backend=eager"]
    assert values(space(*plain, *words), axis) == left


def test_a_rule_about_accumulation_refuses_the_cells_that_accumulate_and_no_others() -> None:
    words = ("backend=eager", "trainer=ddp", "train.grad_accumulation=1", "launcher.workers_per_node=2")
    found = space(*words, "trainer.static_graph=true", hold=(CHECKPOINTING,))
    assert values(found, MICRO) == {6}
    assert {cell[MICRO] for cell, why in found.refused.items() if "static_graph" in why} == {3, 1}


@pytest.mark.parametrize(
    ("words", "refused", "reason"),
    [
        (["trainer=ddp"], {"trainer": "ddp", WORKERS: 1}, "exchanges nothing"),
        (["trainer=fsdp"], {"trainer": "fsdp", WORKERS: 1}, "exchanges nothing"),
        (["trainer=deepspeed"], {"trainer": "deepspeed-z2", WORKERS: 1}, "shards nothing"),
        (["trainer=ddp,single"], {"trainer": "single", WORKERS: 2}, "trainer=single runs one worker"),
        (["backend=eager,ort", "trainer=fsdp"], {WORKERS: 2, "backend": "ort"}, "does not go with trainer=fsdp"),
        (["trainer=ddp,fsdp", "optimizer=adafactor"], {"trainer": "fsdp", WORKERS: 2}, "hands the optimizer shards"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_space_leaves_out_what_a_rule_refuses_or_what_is_pointless(
    monkeypatch: pytest.MonkeyPatch, words: list[str], refused: dict[str, Any], reason: str
) -> None:
    pretend_ort(monkeypatch)
    backend = [] if words[0].startswith("backend") else ["backend=eager"]
    found = space(*backend, "train.activation_checkpointing=false", "launcher.workers_per_node=2,1", *words)
    meant = [why for one, why in found.refused.items() if refused.items() <= dict(one.values).items()]
    assert meant
    assert all(reason in why for why in meant)
    assert not [one for one in found.cells if refused.items() <= dict(one.values).items()]


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (
            ["trainer=single,ddp", "launcher.workers_per_node=2,1"],
            "backend=eager trainer=ddp",
        ),
        (
            ["trainer=fsdp", "backend=ort,eager", "launcher.workers_per_node=2"],
            "backend=eager trainer=fsdp",
        ),
        # The default backend has no kernels for it.
        (
            ["train.precision=bf16", "launcher.workers_per_node=2"],
            "backend=eager trainer=ddp",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_first_combination_that_the_rules_allow_is_what_is_asked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: list[str], asked: str
) -> None:
    backend = [] if any(word.startswith(("backend=", "train.precision")) for word in words) else ["backend=eager"]
    result = answer(tmp_path, capfd, "tune", "model=mlp", "device=cpu", *backend, *words, "launcher.dry_run=true")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[1].strip().startswith(f"{asked} {WORKERS}=2 ")


def test_the_cells_that_would_be_searched_are_there_for_a_program(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("model=mlp", "device=cpu", "backend=eager", "trainer=single,ddp", "launcher.workers_per_node=1")
    result = answer(tmp_path, capfd, "tune", *words, "launcher.dry_run=true", "--format=json")
    planned = json.loads(result.stdout)
    assert planned["asked"] == planned["cells"][0]
    assert {cell["trainer"] for cell in planned["cells"]} == {"single"}
    assert [one["count"] for one in planned["not_tried"]] == [6]


def test_workers_that_cannot_share_the_batch_are_told_of() -> None:
    found = space("backend=eager", "trainer=ddp", "launcher.workers_per_node=2,5", hold=(CHECKPOINTING,))
    assert values(found, WORKERS) == {2}
    assert {why for cell, why in found.refused.items() if cell[WORKERS] == 5} == {
        "a global batch of 24 cannot be divided among 5 workers"
    }


def test_the_divisors_of_a_large_batch_are_found_at_once() -> None:
    begun = time.process_time()
    found = space("backend=eager", "trainer=single", "train.batch_size=1000000000", hold=(CHECKPOINTING,))
    assert {10**9, 5 * 10**8, 1} <= values(found, MICRO)
    assert time.process_time() - begun < 5


def test_held_axes_keep_what_was_asked_for() -> None:
    found = space("backend=eager", hold=(TRAINER, MICRO, CHECKPOINTING))
    assert found.cells == [found.cell, found.cell.having(WORKERS, 2)]
    assert (values(found, MICRO), values(found, CHECKPOINTING)) == ({6}, {OFF})


def test_on_gpus_there_is_a_worker_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_present_gpus", lambda: 2)
    found = Space(["model=mlp", "device=cuda", "backend=eager", "trainer=deepspeed"])
    assert (values(found, WORKERS), values(found, TRAINER)) == ({2}, ZERO)
    offload = ("trainer.zero_stage=1,2", "trainer.offload_optimizer=false,true")
    found = Space(["model=mlp", "device=cuda", "backend=eager", "trainer=deepspeed", *offload])
    assert values(found, "trainer.offload_optimizer") == {"False", "True"}


def test_a_trainer_whose_bf16_is_another_learning_is_searched_only_if_it_is_named() -> None:
    words = ("backend=eager", "train.precision=bf16", "train.activation_checkpointing=false")
    found = space(*words)
    assert values(found, "trainer") == {"single", "ddp"}
    assert any(why.startswith("bf16 in other tensors than under trainer=ddp") for why in found.refused.values())
    assert "deepspeed-z0" in values(space(*words, "trainer=ddp,deepspeed"), "trainer")
    freed = space("backend=eager", "train.precision=bf16,fp32", free=("train.precision",))
    assert {"deepspeed-z0", "fsdp"} <= values(freed, "trainer")


def test_a_freed_batch_is_searched_as_it_is_given() -> None:
    found = space("backend=eager", "trainer=single", "train.batch_size=6,12,24", free=(MICRO,))
    assert {found.global_batch(cell) for cell in found.cells} == {12, 24, 48}
    assert {found.accumulation(cell) for cell in found.cells} == {2}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimizer.lr=0.1,0.2"], "other values change what is learned: give one, or add --free=optimizer.lr"),
        (["train.batch_size=4,8"], "other values change the global batch"),
        (["train.grad_accumulation=1,2"], "tune searches no values of train.grad_accumulation: give one"),
        (["train.precision=fp32,bf16"], "add --free=train.precision"),
        (["optimizer=adamw,sgd"], "add --free=optimizer"),
        (["launcher=local,slurm"], "tune searches no values of launcher"),
        (["run_root=a,b"], "tune searches no values of run_root"),
        (["optimizer.lrr=1,2"], "optimizer.lrr: no such key. Did you mean optimizer.lr?"),
        (["trainer=ddp,dpp"], "trainer=dpp: no such option"),
        (["backend=eager,egaer"], "backend=egaer: no such option. Did you mean backend=eager?"),
        (["backend=auto"], "backend=auto: tune measures the backends itself: name those to search"),
        (["backend=eager,auto"], "backend=auto: tune measures the backends itself"),
        (["launcher.workers_per_node=2,x"], "launcher.workers_per_node"),
        (["launcher.workers_per_node=1,5000"], "launcher.workers_per_node=5000: must be at least 1 and at most"),
        (["launcher.threads=1,many"], "launcher.threads=many: must be a whole number"),
        (["launcher.allocator=keep,jemalloc"], "launcher.allocator=jemalloc: must be one of system, keep"),
        (["launcher.threads=1,2", "--hold=launcher.threads"], "--hold=launcher.threads keeps one value, and 1, 2 are"),
        (["train.activation_checkpointing=false,perhaps"], "must be true or false"),
        (["trainer=ddp,deepspeed", "trainer.zero_stage=0,9"], "trainer.zero_stage=9: must be one of 0, 1, 2, 3"),
        (["backend=glob(*)"], "backend=glob(*): give the values one by one"),
        (["backend=eager,compile", "--hold=backend"], "--hold=backend keeps one value, and eager, compile are given"),
        (["trainer=deepspeed", "trainer.zero_stage=1,2", "--hold=trainer"], "--hold=trainer keeps one value, and 1, 2"),
        (["trainer=ddp,single", "trainer.bucket_cap_mb=50"], "trainer.bucket_cap_mb: the chosen trainer has no such"),
        (["backend=compile,eager", "backend.mode=default"], "backend.mode: the chosen backend has no such key"),
        (["backend=ort", "trainer=fsdp"], "backend=ort does not go with trainer=fsdp"),
        (["--minutes", "0"], "--minutes"),
        (["--minutes=nan"], "--minutes"),
        (["--memory", "lots"], "--memory=lots: not a size of memory"),
        (["--memory=1KiB"], "--memory=1KiB: no trial fits: a worker that has imported torch takes more"),
        (["--hold", "lr"], "--hold=lr: there is no such axis (there are backend, trainer, "),
        (["--free", "model"], "--free=model: give the values that are searched, such as model=A,B"),
        (["--format", "xml"], "--format"),
        (["launcher=slurm"], "launcher=slurm: tune measures on this machine alone"),
        (["launcher.nodes=2", "launcher.master_addr=a"], "launcher.nodes=2"),
        (["--multirun"], "leave --multirun out"),
        (["train.stepz=3"], "train.stepz"),
        (["launcher.stepz=3,4"], "launcher.stepz"),
        (["trainer=single", "backend=eager", "launcher.workers_per_node=2"], "trainer=single runs one worker"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_requests_that_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    result = answer(tmp_path, capfd, "tune", "model=mlp", "device=cpu", *words)
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
