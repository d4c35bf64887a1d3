"""The choice of a run's backend over its starts: what is recorded, kept, damaged or given up."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from torch.distributed import HashStore

from ortlaunch.base.errors import RequestError, WrongGradientsError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import save_config, to_config
from ortlaunch.run import manifest
from ortlaunch.run.run import Run
from ortlaunch.trainer.auto import kind, selection
from ortlaunch.trainer.auto.decision import Choice, Rate
from ortlaunch.trainer.auto.selection import Selection
from tests.support.ort import pretend_ort
from tests.support.servers import free_port
from tests.support.waiting import PATIENCE, until


@pytest.fixture
def chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Starts a run's only worker as far as its choice, with torchrun's own store."""
    pretend_ort(monkeypatch)
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("ORTLAUNCH_LIFE", raising=False)

    def start(*words: str) -> Selection:
        config = to_config(compose(["model=mlp", "backend=auto", "device=cpu", "train.steps=1000", *words]))
        monkeypatch.setenv("MASTER_PORT", str(free_port()))
        return Selection(config, tmp_path, dict(os.environ))

    return start


def test_what_is_settled_is_kept_by_every_later_start(chosen, tmp_path, capsys):
    first = chosen()
    assert (first.backend, first.is_decided) == ("eager", False)
    first.settle(Choice("compile", "measured", is_final=True), None)
    first.rates.note("eager", Rate(1e-6, 0.1))
    again = chosen()
    assert (again.backend, again.is_decided) == ("compile", True)
    assert "backend=auto keeps compile, which this run has begun with" in capsys.readouterr().out


def test_what_has_written_a_checkpoint_is_kept(chosen, tmp_path, monkeypatch):
    first = chosen()
    assert not first.is_decided
    monkeypatch.setattr(Run, "newest_checkpoint", lambda _run: "step-2")
    assert chosen().choice == Choice("eager", first.choice.reason, is_final=True)


def test_without_a_checkpoint_an_undecided_run_chooses_anew(chosen):
    first = chosen()
    for name, step in {"eager": 0.1, "compile": 0.01, "ort": 0.1}.items():
        first.rates.note(name, Rate(step, 1.0))
    assert chosen().backend == "compile"


@pytest.mark.parametrize("content", ["", "[]", '{"backend": "cuda"}', '{"backend": "ort", "reason": 3, "is_final": 1}'])
def test_a_damaged_record_counts_as_none(chosen, tmp_path, content):
    Run(tmp_path).backend_file.write_text(content)
    assert chosen().backend == "eager"


def test_a_run_that_has_chosen_ort_does_not_go_on_where_it_is_missing(chosen, tmp_path, monkeypatch):
    record = {"backend": "ort", "reason": "measured", "is_final": True}
    Run(tmp_path).backend_file.write_text(json.dumps(record))

    def missing(what: str, otherwise: str) -> None:
        raise RequestError(f"{what} needs onnxruntime-training{otherwise}")

    monkeypatch.setattr(selection, "require_ort", missing)
    with pytest.raises(RequestError, match=r"which this run has chosen \(backend=auto\) and keeps"):
        chosen()


def test_a_run_that_has_chosen_ort_is_not_resumed_with_a_precision_that_ort_does_not_go_with(
    chosen, tmp_path, monkeypatch
):
    record = {"backend": "ort", "reason": "measured", "is_final": True}
    Run(tmp_path).backend_file.write_text(json.dumps(record))
    rule = "backend=ort does not go with train.precision=bf16"
    monkeypatch.setattr(selection.candidates, "refused", lambda _config: {"ort": rule})
    with pytest.raises(RequestError, match=rf"^{rule}, and this run has chosen backend=ort .* the device that it had$"):
        chosen()


def test_a_backend_that_fails_at_the_start_is_given_up_and_noted_once_another_has_started(
    chosen, tmp_path, monkeypatch
):
    lives = []
    monkeypatch.setattr(selection, "begin_again", lives.append)
    first = chosen()
    for name, step in {"eager": 0.1, "compile": 0.1, "ort": 0.01}.items():
        first.rates.note(name, Rate(step, 1.0))
    worker = chosen()
    assert worker.backend == "ort"
    worker.give_up(RequestError("a branch is frozen. Use backend=eager\nmore"))
    assert lives == [worker.environment]
    failed = json.loads(worker.store.get("failed/0"))
    assert failed == {"backend": "ort", "reason": "a branch is frozen", "is_refusal": True}
    # The next life, in which the store still has it.
    monkeypatch.setenv("ORTLAUNCH_LIFE", "1")
    monkeypatch.setattr(selection, "store_of_attempt", lambda *_arguments: worker.store)
    other = chosen()
    assert other.backend == "eager"
    assert other.choice.reason.endswith("; without ort: it failed: a branch is frozen")
    assert not other.rates.read()["ort"].unfit
    other.first_step_done(None)
    assert other.rates.read()["ort"].unfit == "a branch is frozen"


def test_the_reason_is_that_of_the_worker_that_failed_first(chosen, monkeypatch, capsys):
    """The others lose their connections to it, and must not replace its reason by that."""
    lives = []
    monkeypatch.setattr(selection, "begin_again", lives.append)
    chosen().rates.note("ort", Rate(0.01, 1.0))
    worker = chosen()
    assert worker.backend == "ort"
    first = {"backend": "ort", "reason": "a branch is frozen", "is_refusal": True}
    worker.store.set("failed/0", json.dumps(first))
    worker.give_up(RuntimeError("Connection closed by peer"))
    assert lives == [worker.environment]
    assert json.loads(worker.store.get("failed/0")) == first
    assert "Connection closed" not in capsys.readouterr().out


def test_after_the_first_step_a_failure_is_the_runs(chosen, monkeypatch):
    monkeypatch.setattr(selection, "begin_again", lambda _environment: pytest.fail("it begins again"))
    first = chosen()
    first.rates.note("ort", Rate(0.01, 1.0))
    worker = chosen()
    assert worker.backend == "ort"
    worker.first_step_done(None)
    worker.give_up(ValueError("later"))
    assert not worker.rates.read()["ort"].unfit


@pytest.mark.parametrize("fails", [False, True])
def test_the_first_step_is_done_when_all_workers_have_done_it(chosen, monkeypatch, fails):
    """One that fails at its end finds none that has gone on with the backend."""
    lives = []
    monkeypatch.setattr(selection, "begin_again", lives.append)
    monkeypatch.setattr(selection, "_LOOK_SECONDS", 0.01)
    chosen().rates.note("ort", Rate(0.01, 1.0))
    worker = chosen()
    # As with connections of their own, a wait for a value keeps nobody else waiting.
    worker.store = HashStore()
    monkeypatch.setattr(selection, "store_of_attempt", lambda *_arguments: worker.store)
    monkeypatch.setenv("WORLD_SIZE", "2")
    worker.watch_start()
    waits = threading.Thread(target=worker.first_step_done, args=(None,), daemon=True)
    waits.start()
    waits.join(0.2)
    assert waits.is_alive()
    assert lives == []
    if fails:
        worker.store.set("failed/0", "{}")
        until(lambda: lives)
        assert set(map(id, lives)) == {id(worker.environment)}
    worker.store.set("started-1/0", "1")
    waits.join(PATIENCE)
    assert not waits.is_alive()


def test_a_run_that_goes_on_from_another_ones_checkpoint_chooses_by_the_steps_that_are_left(tmp_path, chosen):
    checkpoint = tmp_path / "other" / "checkpoints" / "step-00000990"
    checkpoint.mkdir(parents=True)
    (checkpoint / "run.json").write_text('{"step": 990}')
    (checkpoint / manifest.NAME).write_text("{}")
    first = chosen()
    for name, (step, start) in {"eager": (0.1, 1.0), "compile": (0.05, 9.0), "ort": (0.01, 30.0)}.items():
        first.rates.note(name, Rate(step, start))
    assert chosen().backend == "ort"
    for place in (checkpoint, checkpoint.parent, checkpoint.parents[1]):
        there = chosen(f"train.resume={place}")
        assert there.backend == "eager"
        assert "for 10 steps by earlier runs" in there.choice.reason


@pytest.mark.parametrize("kind_of_error", [RequestError, WrongGradientsError])
def test_a_refusal_after_the_first_step_ends_the_run_and_the_next_one_goes_without(
    chosen, tmp_path, monkeypatch, kind_of_error
):
    """Such as a branch that turns out to be frozen at a later batch, or gradients that become wrong."""
    monkeypatch.setattr(selection, "begin_again", lambda _environment: pytest.fail("it begins again"))
    chosen().rates.note("ort", Rate(0.01, 1.0))
    worker = chosen()
    worker.first_step_done(None)
    worker.give_up(kind_of_error("a branch is frozen. Use backend=eager"))
    assert worker.rates.read()["ort"].unfit == "a branch is frozen"
    Run(tmp_path).backend_file.unlink()
    assert chosen().backend == "eager"


def test_a_run_with_another_batch_begins_with_what_was_faster_then(chosen):
    rates = chosen().rates
    rates.note("eager", Rate(0.1, 5.0))
    assert not rates.near()
    rates.note("ort", Rate(0.05, 8.0))
    worker = chosen("train.batch_size=8")
    assert (worker.backend, worker.is_decided) == ("ort", False)
    assert chosen("train.batch_size=8", "model.params.hidden_dim=7").backend == "eager"


def test_runs_of_one_kind_differ_in_nothing_that_a_step_depends_on(tmp_path, monkeypatch):
    def facts(*words: str, world_size: int = 2) -> str:
        config = to_config(compose(["model=mlp", "device=cpu", *words]))
        return json.dumps(kind.facts(config, world_size=world_size, threads=1), sort_keys=True)

    same = facts("backend=eager")
    for words in (["backend=ort"], ["train.steps=7"], ["seed=3"], ["name=x"], ["optimizer.lr=0.1"]):
        assert facts(*words) == same
    for words in (["train.batch_size=5"], ["trainer=single"], ["model.params.hidden_dim=7"], ["optimizer=sgd"]):
        assert facts(*words) != same
    assert facts("launcher.allocator=keep") != same
    assert facts("backend=eager", world_size=3) != same


def test_the_code_of_a_users_model_is_a_part_of_its_kind(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    config = to_config(compose(["model=mlp", "device=cpu"]))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, target="own_nets:Net"))
    (tmp_path / "own_nets.py").write_text("Net = 1\n")
    before = kind.facts(config, world_size=1, threads=1)
    (tmp_path / "own_nets.py").write_text("Net = 2\n")
    assert kind.facts(config, world_size=1, threads=1) != before


IMPORTS = """
import gc, os, sys
from pathlib import Path
from ortlaunch import worker

collections = []
gc.callbacks.append(lambda phase, _info: collections.append(phase))
del os.environ["RANK"]
try:
    worker.work(Path(sys.argv[1]))
except KeyError:
    print("torch" in sys.modules, len(collections))
"""
"""Begins to work, until a choice needs the worker's number."""


def test_a_worker_that_chooses_imports_torch_without_collections(tmp_path):
    save_config(to_config(compose(["model=mlp", "backend=auto", "device=cpu"])), Run(tmp_path).config_file)
    variables = {**os.environ, "RANK": "0", "ORTLAUNCH_STARTED": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    answer = subprocess.run(
        [sys.executable, "-c", IMPORTS, str(tmp_path)], env=variables, capture_output=True, text=True, timeout=300
    )
    imported, collections = answer.stdout.split()
    # There are some 1,100 otherwise, which take 0.3 s of a start.
    assert imported == "True"
    assert int(collections) < 200
