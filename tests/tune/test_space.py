"""The cells around a configuration: same learning, held axes, freed ones, and what is refused."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.compose.hydra_tree import compose
from ortlaunch.compose.prepare import prepared
from ortlaunch.config import devices
from ortlaunch.config.load import to_config, to_dict
from ortlaunch.config.schema import Config
from ortlaunch.tune import command
from ortlaunch.tune import space as module
from ortlaunch.tune.cell import Effort
from ortlaunch.tune.job import command_of, write_job
from ortlaunch.tune.space import Space
from ortlaunch.tune.trial import Trials, steps_for
from ortlaunch.tune.words import taken_apart
from tests.support.cli import answer

BASE = ("model=mlp", "device=cpu", "launcher.workers_per_node=1,2", "train.batch_size=6", "train.grad_accumulation=2")


def space(*words: str, free: tuple[str, ...] = (), hold: tuple[str, ...] = ()) -> Space:
    taken = taken_apart([*BASE, *words], free)
    return Space(prepared(to_config(compose(taken.composed))), taken, free, hold)


def values(found: Space, axis: str) -> set[Any]:
    return {dict(cell.values)[axis] for cell in found.cells}


def config_of(found: Space, words: list[str]) -> Config:
    return prepared(to_config(compose(words)))


def test_every_cell_keeps_the_global_batch_precision_and_optimizer() -> None:
    found = space("backend=eager", "train.activation_checkpointing=false")
    assert found.batch == 12
    for cell in found.cells:
        config = found.configured(cell)
        workers = config.launcher.workers_per_node
        assert workers is not None
        assert config.train.batch_size * config.train.grad_accumulation * workers == 12
        assert (config.train.precision, config.optimizer) == (found.asked.train.precision, found.asked.optimizer)
    assert values(found, "micro_batch") == {12, 6, 3, 1}
    assert values(found, "workers") == {1, 2}
    assert {"single", "ddp", "ddp-buckets", "fsdp", "fsdp-keep", "zero0", "zero3"} <= values(found, "trainer")


def test_a_number_of_workers_that_is_given_twice_is_searched_once() -> None:
    found = space("backend=eager", "trainer=ddp", "launcher.workers_per_node=2,2,null")
    assert len(found.cells) == len(set(found.cells)) > 0


def test_the_words_of_a_cell_compose_its_configuration() -> None:
    words = ("backend=eager,compile", "trainer=single,deepspeed", "trainer.zero_stage=2", "data.eval_fraction=0.1")
    found = space(*words, free=("precision", "optimizer"))
    for cell in found.cells[5 :: len(found.cells) // 3]:
        composed = config_of(found, [*found.words.kept, *found.overrides(cell)])
        assert to_dict(composed) == to_dict(found.configured(cell)), cell


@pytest.mark.parametrize(
    ("words", "axis", "left"),
    [
        (["backend=eager", "trainer=single"], "backend", {"eager"}),
        (["backend=compile,eager", "trainer=single"], "backend", {"compile", "eager"}),
        (["trainer=ddp"], "trainer", {"ddp", "ddp-buckets"}),
        (["trainer=ddp", "trainer.bucket_cap_mb=50"], "trainer", {"ddp"}),
        (["trainer=ddp,deepspeed", "trainer.zero_stage=1,2"], "trainer", {"ddp", "ddp-buckets", "zero1", "zero2"}),
        (["train.activation_checkpointing=true", "trainer=single"], "checkpointing", {"on"}),
        (["backend=compile", "backend.mode=default", "trainer=single"], "backend", {"compile"}),
    ],
)
def test_a_key_holds_its_axis(words: list[str], axis: str, left: set[str]) -> None:
    plain = [] if axis == "backend" else ["backend=eager"]
    assert values(space(*plain, *words), axis) == left


def test_a_rule_about_accumulation_refuses_the_cells_that_accumulate_and_no_others() -> None:
    words = ("backend=eager", "trainer=ddp", "train.grad_accumulation=1", "launcher.workers_per_node=2")
    found = space(*words, "trainer.static_graph=true", hold=("checkpointing",))
    assert values(found, "micro_batch") == {6}
    assert {cell["micro_batch"] for cell, why in found.refused.items() if "static_graph" in why} == {3, 1}
    for cell in found.cells:
        found.configured(cell)


def test_a_key_that_every_trainer_has_holds_none_and_stays_with_each() -> None:
    found = space("backend=eager", "trainer=ddp,single", "trainer.timeout_seconds=77")
    assert values(found, "trainer") == {"ddp", "ddp-buckets", "single"}
    for cell in found.cells:
        config = found.configured(cell)
        assert config.trainer.timeout_seconds == 77
        composed = config_of(found, [*found.words.kept, *found.overrides(cell)])
        assert to_dict(composed) == to_dict(config), cell


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["trainer=single,ddp", "launcher.workers_per_node=2,1"], "backend=eager trainer=ddp workers=2"),
        (["trainer=fsdp", "backend=ort,eager", "launcher.workers_per_node=2"], "backend=eager trainer=fsdp workers=2"),
        # The default backend has no kernels for it.
        (["train.precision=bf16", "launcher.workers_per_node=2"], "backend=eager trainer=ddp workers=2"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_first_combination_that_the_rules_allow_is_what_is_asked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: list[str], asked: str
) -> None:
    backend = [] if any(word.startswith(("backend=", "train.precision")) for word in words) else ["backend=eager"]
    result = answer(tmp_path, capfd, "tune", "model=mlp", "device=cpu", *backend, *words, "launcher.dry_run=true")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[1].strip().startswith(asked)


def test_the_cells_that_would_be_searched_are_there_for_a_program(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("model=mlp", "device=cpu", "backend=eager", "trainer=single,ddp", "launcher.workers_per_node=1")
    held = ("launcher.threads=1", "launcher.allocator=system")
    result = answer(tmp_path, capfd, "tune", *words, *held, "launcher.dry_run=true", "--format=json")
    planned = json.loads(result.stdout)
    assert planned["asked"] == planned["cells"][0]
    assert {cell["trainer"] for cell in planned["cells"]} == {"single"}
    assert [one["count"] for one in planned["not_tried"]] == [12]


def test_every_backend_is_looked_at_but_the_one_that_is_a_choice_among_them() -> None:
    found = space("trainer=single")
    looked_at = {cell["backend"] for cell in [*found.cells, *found.refused]}
    assert looked_at == {"eager", "compile", "ort"}


def test_workers_that_cannot_share_the_batch_are_told_of() -> None:
    found = space("backend=eager", "trainer=ddp", "launcher.workers_per_node=2,5", hold=("checkpointing",))
    assert values(found, "workers") == {2}
    assert {why for cell, why in found.refused.items() if cell["workers"] == 5} == {
        "a global batch of 24 cannot be divided among 5 workers"
    }


def test_the_divisors_of_a_large_batch_are_found_at_once() -> None:
    begun = time.process_time()
    found = space("backend=eager", "trainer=single", "train.batch_size=1000000000", hold=("checkpointing",))
    assert {10**9, 5 * 10**8, 1} <= values(found, "micro_batch")
    assert time.process_time() - begun < 5


def test_an_option_that_is_given_twice_counts_twice() -> None:
    options = command._parser().parse_args(["--hold=backend,trainer", "--hold", "micro-batch", "--free", "precision"])
    assert (options.hold, options.free) == (["backend", "trainer", "micro_batch"], ["precision"])


def test_held_axes_keep_what_was_asked_for() -> None:
    found = space("backend=eager", hold=("trainer", "micro_batch", "checkpointing", "threads", "allocator"))
    assert found.cells == [found.cell, found.cell.having(workers=2)]
    assert values(found, "micro_batch") == {6}
    assert values(found, "checkpointing") == {"off"}


def test_threads_share_the_cores_or_leave_some_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "usable_cores", lambda: 12)
    words = ("backend=eager", "trainer=ddp,single", "launcher.workers_per_node=1,2,4", "train.batch_size=24")
    found = space(*words, hold=("checkpointing", "allocator"))
    threads = {workers: {one["threads"] for one in found.cells if one["workers"] == workers} for workers in (1, 2, 4)}
    assert threads == {1: {12, 6, 1}, 2: {6, 3, 1}, 4: {3, 2, 1}}
    # What is asked for shares the cores, whatever machine the job is taken to.
    assert (found.cell["threads"], found.configured(found.cell).launcher.threads) == (12, None)
    assert "launcher.threads=null" in found.overrides(found.cell)
    assert "launcher.threads=6" in found.overrides(found.cell.having(threads=6))


@pytest.mark.parametrize(
    ("words", "hold", "threads", "allocators"),
    [
        (("launcher.threads=1",), (), {1}, {"system", "keep"}),
        (("launcher.threads=3,null",), (), {3, 4}, {"system", "keep"}),
        (("launcher.allocator=keep",), ("threads",), None, {"keep"}),
        (("launcher.allocator=keep", "launcher.threads=2"), ("threads", "allocator"), None, None),
        (("device=cuda",), (), None, None),
        (("device=cuda", "launcher.threads=2,4"), (), {2, 4}, None),
    ],
    ids=["one", "given", "threads held", "both held", "on a GPU", "given on a GPU"],
)
def test_threads_and_allocator_have_a_place_where_they_are_searched(
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    hold: tuple[str, ...],
    threads: set[int] | None,
    allocators: set[str] | None,
) -> None:
    monkeypatch.setattr(module, "usable_cores", lambda: 4)
    monkeypatch.setattr(devices, "_present_gpus", lambda: 1)
    everything = ("backend=eager", "trainer=single", "launcher.workers_per_node=1", *words)
    found = space(*everything, hold=(*hold, "micro_batch", "checkpointing"))
    for axis, expected in (("threads", threads), ("allocator", allocators)):
        assert {dict(cell.values).get(axis) for cell in found.cells} == (expected or {None})
    for cell in found.cells:
        composed = config_of(found, [*found.words.kept, *found.overrides(cell)])
        assert to_dict(composed) == to_dict(found.configured(cell)), cell


def test_on_gpus_the_optimizer_may_be_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_present_gpus", lambda: 2)
    words = ("device=cuda", "backend=eager", "trainer=deepspeed", "launcher.workers_per_node=2")
    plain, offloaded = {"zero0", "zero1", "zero2", "zero3"}, {"zero1-offload", "zero2-offload", "zero3-offload"}
    found = space(*words, hold=("micro_batch", "checkpointing"))
    assert values(found, "trainer") == plain | offloaded
    for cell in found.cells:
        composed = config_of(found, [*found.words.kept, *found.overrides(cell)])
        assert to_dict(composed) == to_dict(found.configured(cell)), cell
        assert composed.trainer.offload_optimizer == str(cell["trainer"]).endswith("-offload")
    assert values(space(*words, "trainer.zero_stage=1,2"), "trainer") == {
        *("zero1", "zero2", "zero1-offload", "zero2-offload")
    }
    asked = space(*words, "trainer.zero_stage=2,3", "trainer.offload_optimizer=true")
    assert values(asked, "trainer") == {"zero2-offload", "zero3-offload"}
    assert values(space(*words[1:]), "trainer") == plain


def test_a_trainer_whose_bf16_is_another_learning_is_searched_only_if_it_is_named() -> None:
    words = ("backend=eager", "train.precision=bf16", "train.activation_checkpointing=false")
    found = space(*words)
    assert values(found, "trainer") == {"single", "ddp", "ddp-buckets"}
    assert any(why.startswith("bf16 in other tensors than under trainer=ddp") for why in found.refused.values())
    assert "zero0" in values(space(*words, "trainer=ddp,deepspeed"), "trainer")
    assert {"zero0", "fsdp"} <= values(space(*words, free=("precision",)), "trainer")


def test_freed_axes_are_searched() -> None:
    found = space("backend=eager", "trainer=single", free=("batch", "precision", "optimizer"))
    assert {found.global_batch(cell) for cell in found.cells} > {6, 12, 24, 48}
    assert values(found, "precision") == {"fp32", "bf16"}
    assert {"adamw", "sgd"} <= values(found, "optimizer")


def test_a_trial_is_the_run_with_fewer_steps_and_without_what_only_long_runs_need(tmp_path: Path) -> None:
    found = space("backend=eager", "trainer=single", "train.eval_every=10", "train.steps=5000")
    trials = Trials(found, tmp_path, None, lambda: 0, lambda run: None)
    config = trials.trained(found.cell, Effort("short", 0, 2.0, 600.0, 60.0))
    # 600 samples/s and 12 samples a step: 100 steps in 2 s, after three that do not count.
    assert config.train.steps == 103
    assert (config.train.eval_every, config.train.checkpoint_every, config.train.save_weights) == (None, None, False)
    assert config.train.memory_check.value == "off"
    # After a kill of the search, workers in a long step would go on for the usual two minutes.
    assert (config.launcher.max_restarts, config.launcher.grace_seconds) == (0, 1)
    assert config.train.batch_size == found.configured(found.cell).train.batch_size
    assert steps_for(Effort("probe", 0, 0.0, None, 60.0), 12) == 6
    assert steps_for(Effort("short", 0, 2.0, 1e9, 60.0), 12) == 20_000


def test_the_winner_is_a_ready_job_and_a_command_that_compose_to_it(tmp_path: Path) -> None:
    found = space("backend=eager", "optimizer.lr=0.01", "model.params.hidden_dim=32", "trainer=fsdp", "train.steps=77")
    cell = next(one for one in found.cells if one["trainer"] == "fsdp-keep")
    config = found.configured(cell)
    path, way = write_job(config, tmp_path / "jobs", "found by a test")
    assert path is not None, way
    assert path.read_text().startswith("# found by a test\n")
    assert f"ORTLAUNCH_JOBS={tmp_path / 'jobs'} ortlaunch +jobs=tuned_mlp" == way
    command = command_of(found.words.kept, found.overrides(cell), config)
    assert command is not None
    assert "trainer.reshard_after_forward=false" in command
    assert "optimizer.lr=0.01" in command
    # Words that do not lead there are not passed on.
    assert command_of([*found.words.kept, "train.clip_grad_norm=2"], found.overrides(cell), config) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimizer.lr=0.1,0.2"], "give one value here (ortlaunch bench runs any grid)"),
        (["train.batch_size=4,8"], "--free=batch"),
        (["train.precision=fp32,bf16"], "add --free=precision"),
        (["optimizer=adamw,sgd"], "add --free=optimizer"),
        (["trainer=ddp,dpp"], "trainer=dpp"),
        (["backend=eager,egaer"], "backend=egaer: must be one of"),
        (["backend=auto"], "backend=auto: tune measures the backends itself: name those to search"),
        (["backend=eager,auto"], "backend=auto: tune measures the backends itself"),
        (["launcher.workers_per_node=2,x"], "launcher.workers_per_node=x"),
        (["launcher.threads=1,many"], "launcher.threads=many: must be a number, at least 1"),
        (["launcher.allocator=keep,jemalloc"], "launcher.allocator=jemalloc: must be one of system, keep"),
        (["launcher.threads=1,2", "--hold=threads"], "--hold=threads keeps one value, and 1, 2 are given"),
        (["train.activation_checkpointing=false,perhaps"], "must be true or false"),
        (
            ["launcher.workers_per_node=1,5000"],
            "launcher.workers_per_node=5000: must be a number, at least 1 and at most",
        ),
        (["trainer=ddp,deepspeed", "trainer.zero_stage=0,9"], "trainer.zero_stage=9: must be one of 0, 1, 2 and 3"),
        (["backend=glob(*)"], "backend=glob(*): give the values one by one"),
        (["backend=eager,compile", "--hold=backend"], "--hold=backend keeps one value, and eager, compile are given"),
        (["trainer=deepspeed", "trainer.zero_stage=1,2", "--hold=trainer"], "--hold=trainer keeps one value, and 1, 2"),
        (
            ["trainer=ddp,single", "trainer.bucket_cap_mb=50"],
            "trainer.bucket_cap_mb is a key of trainer=ddp, and ddp, single are given to search",
        ),
        (
            ["backend=compile,eager", "backend.mode=default"],
            "backend.mode is a key of backend=compile, and compile, eager",
        ),
        (["backend=ort", "trainer=fsdp"], "backend=ort does not go with trainer=fsdp"),
        (["--minutes", "0"], "--minutes"),
        (["--minutes=nan"], "--minutes"),
        (["--memory", "lots"], "--memory=lots: not a size of memory"),
        (["--memory=1KiB"], "--memory=1KiB: no trial fits: a worker that has imported torch takes more"),
        (["--memory", "199MiB"], "--memory=199MiB: no trial fits: a worker that has imported torch takes more"),
        (["--hold", "lr"], "'lr': must be of backend"),
        (["--free", "model"], "'model': must be of batch"),
        (["--format", "xml"], "--format"),
        (["launcher=slurm"], "launcher=slurm: tune measures on this machine alone"),
        (["launcher.nodes=2", "launcher.master_addr=a"], "launcher.nodes=2"),
        (["--multirun"], "leave --multirun out"),
        (["train.stepz=3"], "train.stepz"),
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
