"""What a run is built of, and the random numbers that its first step draws."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy
import pytest
import torch
import torch.distributed as dist

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.models.task import Batch, Task
from ortlaunch.run import checkpoints as store
from ortlaunch.run.events import Rewound
from ortlaunch.run.journal import iterate
from ortlaunch.trainer import build, prepare, run, session, stop
from ortlaunch.trainer.backend_run import BackendRun
from ortlaunch.trainer.checkpoint import resume
from ortlaunch.trainer.checkpoint.saver import Saver, Written
from ortlaunch.trainer.feed import Lookahead
from ortlaunch.trainer.prepare import check_ids
from ortlaunch.trainer.workers import Workers, separate_group

WORDS = ("model=mlp", "data=digits", "train.batch_size=4", "trainer=single", "backend=eager", "device=cpu")


def test_a_model_that_is_loaded_in_evaluation_mode_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "from torch import nn\n\n\ndef make():\n    return nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval()\n"
    (tmp_path / "loaded_nets.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    config = to_config(compose(["model=factory", "model.target=loaded_nets:make", *WORDS[1:]]))
    assert all(module.training for module in prepare.build_seeded(config).modules())


class Draws(BackendRun):
    """A backend whose check reads further batches and draws from every generator."""

    check_batches = 2
    batches: list[Batch]

    def check(self, task: Task, batches: list[Batch]) -> dict[str, float]:
        self.batches = batches
        draw_from_every_generator()
        return {"startup/ort_check_seconds": 1.0}


def draw_from_every_generator() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., session.Session]]:
    """Opens the context of a run of one worker in this process."""
    made = []

    def make(*words: str) -> session.Session:
        run_dir = tmp_path / str(len(made))
        run_dir.mkdir()
        config = to_config(compose([*WORDS, *words]))
        made.append(session.Session(config, run_dir, Workers(0, 1, torch.device("cpu"), threads=1), 0.0))
        return made[-1]

    monkeypatch.setattr(stop.StopRequests, "listen", lambda _: None)  # The signals are the tests' own.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield make
    for one in made:
        one.system.sampler.stop()
        one.watch.stop()
    dist.destroy_process_group()


def test_what_the_start_check_draws_and_reads_does_not_reach_the_training(
    opened: Callable[..., session.Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a check and without one, the first step draws the same numbers and gets the same batches."""
    plain = build.build(opened(), {})
    expected = draw_from_every_generator(), [next(plain.batches).batch["labels"].tolist() for _ in range(4)]
    draws = Draws()
    monkeypatch.setattr(build, "backend_run", lambda *_: draws)
    parts = build.build(opened(), {"startup/import_seconds": 2.0})
    found = draw_from_every_generator(), [next(parts.batches).batch["labels"].tolist() for _ in range(4)]
    assert found == expected
    assert [batch["labels"].tolist() for batch in draws.batches] == expected[1][:3]
    # The build's time ends before the check begins, and what came before both is kept.
    assert list(parts.startup) == [f"startup/{name}_seconds" for name in ("import", "build", "ort_check")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.image_size=9"], "labels (4,) int64): mat1 and mat2 shapes cannot be multiplied"),
        (["model=vit", "data.image_size=9"], "doesn't match model"),
        (["model=vit", "model.params.patch_size=16"], "model=vit cannot compute a sample of data=digits"),
        (["model=vit", "model.params.num_channels=3"], "model=vit cannot compute a sample of data=digits"),
        (["model.params.output_dim=5"], "the data has 10 classes and the model's cross entropy knows 5: set model."),
        (["model=resnet", "model.params.num_labels=7"], "knows 7: set model.params.num_labels=10"),
    ],
)
def test_a_library_model_that_cannot_take_the_data_says_so_in_one_message(
    opened: Callable[..., session.Session], words: list[str], said: str
) -> None:
    with pytest.raises(RequestError) as caught:
        build.build(opened(*words), {})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_count_of_operations_leaves_the_first_batch_as_it_is(
    opened: Callable[..., session.Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Doubles(torch.nn.Module):
        """Changes its input in place."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(64, 10)

        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            pixel_values *= 2
            return self.linear(pixel_values.flatten(1))

    made = opened()
    (before,) = Lookahead(build.open_data(made)[0]).peek(1)
    loader, _ = build.open_data(made)
    batches = Lookahead(loader)
    build.first_forward(made, Doubles(), loader, batches)
    (after,) = batches.peek(1)
    torch.testing.assert_close(after["pixel_values"], before["pixel_values"], rtol=0.0, atol=0.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_worker_counts_operations(
    rank: int, opened: Callable[..., session.Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward with a collective waits for all of them."""
    made = opened()
    loader, _ = build.open_data(made)
    model, _, _ = build.build_model(made, loader)
    monkeypatch.setattr(build, "counted_flops", lambda *_: 7.0)
    made.workers = Workers(rank, 2, torch.device("cpu"), threads=1)
    assert build.first_forward(made, model, loader, Lookahead(loader))[1] == 7.0


def test_a_users_own_model_that_cannot_take_the_data_has_its_traceback() -> None:
    class Fails(torch.nn.Module):
        said = "no such size"

        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            raise RuntimeError(self.said)

    model, config = Fails(), to_config(compose([*WORDS]))
    task = cast(Task, SimpleNamespace(loss=lambda model, batch: model(**batch)))
    batch = {"pixel_values": torch.zeros(2, 1)}
    with pytest.raises(RuntimeError, match="no such size"):
        prepare.counted_flops(config, model, task, batch)
    model.said = "No backend type associated with device type cpu"
    assert prepare.counted_flops(config, model, task, batch) is None


def test_the_processes_that_read_data_keep_no_copy_of_the_first_weights(
    opened: Callable[..., session.Session],
) -> None:
    """They are forked before there are any."""
    loader, _ = build.open_data(opened("data.workers=1"))
    with loader:
        before = list(loader.processes)
        next(loader)
        assert len(before) == 1 and list(loader.processes) == before


def test_the_job_of_a_resume_follows_what_it_was_given(
    opened: Callable[..., session.Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the run's fourth attempt and the first one of its own launch. Later ones take the newest checkpoint."""
    asked = []
    monkeypatch.setattr(resume, "find", lambda *_, attempt: asked.append(attempt) or resume.Start())
    monkeypatch.setenv("ORTLAUNCH_ATTEMPT", "3")
    for restarts in ("0", "1"):
        monkeypatch.setenv("ORTLAUNCH_RESTARTS", restarts)
        made = opened()
        build.build(made, {})
        assert made.attempt == 3
    assert asked == [0, 1]


def test_a_checkpoint_goes_on_with_its_own_random_numbers_weights_and_data(
    opened: Callable[..., session.Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever building, restoring and checking draw before the first step."""
    first = opened()
    built, _, _ = run.begin(first, {})
    for _ in first.micro_batches():
        pass
    draw_from_every_generator()
    with torch.no_grad():
        next(built.model.parameters()).fill_(0.25)
    first.save(1)
    expected = draw_from_every_generator(), next(built.batches).batch["labels"].tolist()
    first.finish()
    monkeypatch.setattr(build, "backend_run", lambda *_: Draws())
    second = opened(f"train.resume={first.run.path}", "optimizer.lr=0.5")
    parts = build.build(second, {})
    assert second.start.step == 1
    assert second.engine.lr == 0.5, "a key that a resume changes has its effect"
    assert (draw_from_every_generator(), next(parts.batches).batch["labels"].tolist()) == expected
    assert bool((next(parts.model.parameters()) == 0.25).all())


def test_token_ids_that_the_model_does_not_know_are_refused_before_it_is_called() -> None:
    """Of files whose vocabulary nobody has named, such as GPT-2's tokens for a model over bytes."""
    model = torch.nn.Embedding(256, 2)
    check_ids(model, {"input_ids": torch.tensor([[1, 300]])})
    model.config = SimpleNamespace(vocab_size=256)  # type: ignore[assignment]
    check_ids(model, {"input_ids": torch.tensor([[1, 255]])})
    check_ids(model, {"pixel_values": torch.ones(1, 1, 8, 8)})
    with pytest.raises(RequestError, match=r"token id 300 .* knows 256 ids: set model\.params\.vocab_size"):
        check_ids(model, {"input_ids": torch.tensor([[1, 300]])})


def saved(made: session.Session, refusal: str = "") -> Written:
    """What comes of a checkpoint of a state without an engine."""
    saver = Saver(store.Store(made.run.checkpoints, keep=1), made.workers, separate_group(made.config))
    saver.save(3, lambda folder, **_: lambda group: None, {}, {"step": 3}, refusal, shared=True, keep_memory=False)
    (written,) = saver.wait()
    return written


def test_a_checkpoint_is_complete_also_where_no_link_can_be_made(
    opened: Callable[..., session.Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a run that is stopped would fail although it can go on, and would say that it has no checkpoint."""

    def refuse(path: Path, _target: str) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(path))

    monkeypatch.setattr(Path, "symlink_to", refuse)
    made = opened()
    written = saved(made)
    assert written.error == ""
    assert "latest" in written.untidy and "Operation not permitted" in written.untidy
    assert made.run.newest_checkpoint() == "step-00000003"


def test_a_state_that_must_not_be_kept_is_not_written(opened: Callable[..., session.Session]) -> None:
    made = opened()
    assert saved(made, "its loss was not finite at step 2").error == "rank 0: its loss was not finite at step 2"
    assert list(made.run.checkpoints.glob("*")) == []


def test_a_refused_run_keeps_its_checkpoints(opened: Callable[..., session.Session]) -> None:
    """They are set aside when nothing refuses the run any more. Else the next resume would begin from nothing."""
    made = opened("train.resume=never", "train.eval_every=1", "data.eval_fraction=0")
    kept = store.Store(made.run.checkpoints, keep=1)
    kept.begin(7)
    path = kept.commit(7, {"step": 7})
    with pytest.raises(RequestError, match="no held-out samples"):
        run.begin(made, {})
    assert path.is_dir()
    made.config.train.eval_every = None
    run.begin(made, {})
    assert [one.name for one in made.run.checkpoints.glob("step-*")] == ["step-00000007.aside-1"]


def test_a_run_that_begins_again_without_a_checkpoint_goes_back_to_the_beginning(
    opened: Callable[..., session.Session],
) -> None:
    """Else the steps of both attempts would count, and the goodput would be too good."""
    made = opened()
    assert made.journal is not None
    for begun in (True, False):
        made.journal.start("e", "n", "aaaaaa")
        run.begin(made, {})
        if begun:
            made.journal.metrics(3, {"train/loss": 1.0})
    rewinds = [event.step for event in iterate(made.run.journal_file) if isinstance(event, Rewound)]
    assert rewinds == [0]
    assert made.run.state().step == 0
