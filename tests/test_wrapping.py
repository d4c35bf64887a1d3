"""The order is enforced where it happens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.config.schema import Config, EagerConfig, OrtConfig
from ortlaunch.models.registry import build_model
from ortlaunch.models.task import Task, make_task
from ortlaunch.ort import session
from ortlaunch.trainer.checkpoint.host import HostMemory
from ortlaunch.trainer.engines.ddp_engine import DdpEngine
from ortlaunch.trainer.engines.deepspeed_engine import DeepSpeedEngine, deepspeed_config
from ortlaunch.trainer.engines.torch_engine import TorchEngine
from ortlaunch.trainer.workers import Workers
from ortlaunch.trainer.wrapping import wrap, wrap_backend, wrap_trainer
from tests.support.alone import alone

WORKERS = Workers(0, 1, torch.device("cpu"), 2)
TASK = Task(by_name=(), by_position=("x",))


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    """A real group of one worker, so that DDP and DeepSpeed can be built."""
    with alone():
        yield


def config(*overrides: str) -> Config:
    return to_config(compose(["device=cpu", "model=mlp", *overrides]))


def backend(model: torch.nn.Module, cfg: EagerConfig | OrtConfig | None = None) -> torch.nn.Module:
    return wrap_backend(model, cfg or EagerConfig(), threads=1, onnx_dir=Path("onnx"))


def mlp() -> torch.nn.Module:
    return build_model(config().model)


@pytest.mark.parametrize("cfg", [EagerConfig(), OrtConfig()], ids=["eager", "ort"])
def test_a_model_under_ddp_is_too_late_for_a_backend(cfg: EagerConfig | OrtConfig) -> None:
    with pytest.raises(RequestError, match="DistributedDataParallel"):
        backend(DistributedDataParallel(mlp()), cfg)


def test_a_model_under_deepspeed_is_too_late_for_a_backend() -> None:
    engine = wrap_trainer(mlp(), config("trainer=deepspeed", "backend=eager"), WORKERS, TASK)
    assert isinstance(engine, DeepSpeedEngine)
    with pytest.raises(RequestError, match="DeepSpeed"):
        backend(engine._engine, OrtConfig())


@pytest.mark.ort
def test_an_ortmodule_is_not_wrapped_again() -> None:
    with pytest.raises(RequestError, match="ORTModule"):
        backend(backend(mlp(), OrtConfig()), OrtConfig())


@pytest.mark.parametrize("place", ["outside", "inside"])
def test_data_parallel_is_rejected_anywhere_and_the_alternative_named(place: str) -> None:
    model: torch.nn.Module = torch.nn.DataParallel(mlp())
    if place == "inside":
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), model)
    with pytest.raises(RequestError, match="DistributedDataParallel"):
        backend(model)
    with pytest.raises(RequestError, match="DistributedDataParallel"):
        wrap_trainer(model, config("backend=eager"), WORKERS, TASK)


@pytest.mark.ort
def test_data_parallel_around_an_ortmodule_is_rejected() -> None:
    with pytest.raises(RequestError, match="DistributedDataParallel"):
        wrap_trainer(torch.nn.DataParallel(backend(mlp(), OrtConfig())), config(), WORKERS, TASK)


@pytest.mark.ort
@pytest.mark.parametrize("trainer", ["ddp", "deepspeed", "single"])
def test_the_backend_is_inside_and_the_trainer_around_it(trainer: str, tmp_path: Path) -> None:
    chosen = config(f"trainer={trainer}")
    batch = {"pixel_values": torch.rand(4, 1, 8, 8), "labels": torch.tensor([1, 2, 3, 4])}
    model = mlp()
    task = make_task(model, batch)
    engine = wrap(model, chosen, WORKERS, task, tmp_path)
    assert type(engine.inner).__name__ == "ORTModule"
    first = engine.micro_step(batch, last=True).loss
    engine.step()
    for _ in range(5):
        last = engine.micro_step(batch, last=True).loss
        engine.step()
    assert last < first
    assert session.is_active(engine.inner)
    if isinstance(engine, TorchEngine):
        assert isinstance(engine.module, DistributedDataParallel) == (trainer == "ddp")
    else:
        assert engine._engine.module is engine.inner


@pytest.mark.parametrize(
    ("overrides", "static"),
    [
        (["model=mlp"], True),
        (["model=mlp", "train.grad_accumulation=2"], False),
        (["model=mlp", "trainer.static_graph=false"], False),
        (["model=hf", "model.params.pretrained=x"], False),
        (["model=factory", "model.target=a.b:c"], False),
        (["model=factory", "model.target=a.b:c", "trainer.static_graph=true"], True),
    ],
)
def test_ddp_takes_the_graph_for_static_where_the_model_is_known_to_allow_it(
    overrides: list[str], static: bool, tmp_path: Path
) -> None:
    batch = {"pixel_values": torch.rand(4, 1, 8, 8), "labels": torch.tensor([1, 2, 3, 4])}
    model = mlp()
    engine = wrap(model, config("backend=eager", *overrides), WORKERS, make_task(model, batch), tmp_path)
    assert isinstance(engine, DdpEngine)
    assert engine.module.static_graph is static
    assert engine.module.gradient_as_bucket_view


def test_parameters_without_a_part_in_the_loss_are_named_with_the_key(tmp_path: Path) -> None:
    """DDP itself says it in eight lines, with the names of its own arguments and the numbers of the parameters."""
    batch = {"pixel_values": torch.rand(4, 1, 8, 8), "labels": torch.tensor([1, 2, 3, 4])}
    model = mlp()
    model.idle = torch.nn.Linear(2, 2)
    words = ("backend=eager", "trainer.static_graph=false")
    engine = wrap(model, config(*words), WORKERS, make_task(model, batch), tmp_path)
    with pytest.raises(RequestError, match=r"idle\.bias, idle\.weight: set trainer\.find_unused_parameters=true"):
        engine.micro_step(batch, last=True)


class Taught(torch.nn.Module):
    """A model beside which weights are used without gradients, as a teacher's are."""

    def __init__(self, is_used: bool) -> None:
        super().__init__()
        self.pupil, self.teacher, self.is_used = torch.nn.Linear(64, 10), torch.nn.Linear(64, 10), is_used

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = pixel_values.flatten(1)
        taught = self.teacher(x) if self.is_used else self.teacher(x).detach()
        return torch.nn.functional.mse_loss(self.pupil(x), taught) + 0.0 * labels.sum()


@pytest.mark.ort
@pytest.mark.parametrize("is_used", [True, False])
@pytest.mark.parametrize("words", [(), ("train.grad_accumulation=2",)], ids=["", "accumulated"])
def test_weights_without_gradients_do_not_decay_under_ort_and_ddp(
    is_used: bool, words: tuple[str, ...], tmp_path: Path
) -> None:
    """In eager PyTorch, DDP refuses them, or with trainer.find_unused_parameters=true leaves them as they are."""
    batch = {"pixel_values": torch.rand(4, 1, 8, 8), "labels": torch.zeros(4)}
    model = Taught(is_used)
    chosen = config("optimizer.weight_decay=0.5", "trainer.static_graph=false", *words)
    engine = wrap(model, chosen, WORKERS, make_task(model, batch), tmp_path)
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    for _ in range(2):
        for index in range(chosen.train.grad_accumulation):
            engine.micro_step(batch, last=index == chosen.train.grad_accumulation - 1)
        engine.step()
    changed = {name.partition(".")[0] for name, one in model.named_parameters() if not torch.equal(one, before[name])}
    assert changed == ({"pupil", "teacher"} if is_used else {"pupil"})


def test_deepspeeds_timer_that_waits_for_the_device_is_off() -> None:
    chosen = config("trainer=deepspeed", "trainer.zero_stage=2", "+trainer.config.zero_optimization.overlap_comm=true")
    generated = deepspeed_config(chosen, chosen.trainer, 1000, torch.device("cpu"))
    assert generated["timers"] == {"throughput": {"enabled": False}}
    assert generated["wall_clock_breakdown"] is False
    on_gpu = deepspeed_config(chosen, chosen.trainer, 1000, torch.device("cuda"))
    assert on_gpu["zero_optimization"] == {"stage": 2, "overlap_comm": True}
    # What the user adds is merged, not put in place of the generated part.
    assert generated["zero_optimization"] == {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 1000}


@pytest.mark.ort
@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_worker_leaves_its_graphs(rank: int, tmp_path: Path) -> None:
    chosen = config("trainer=single", "backend.debug.save_onnx=true")
    batch = {"pixel_values": torch.rand(4, 1, 8, 8), "labels": torch.tensor([1, 2, 3, 4])}
    model = mlp()
    engine = wrap(model, chosen, Workers(rank, 2, torch.device("cpu"), 2), make_task(model, batch), tmp_path)
    engine.micro_step(batch, last=True)
    assert len(list(tmp_path.glob("onnx/*.onnx"))) == (5 if rank == 0 else 0)


@pytest.mark.parametrize(
    "words",
    [
        ("trainer=single",),
        ("trainer=fsdp",),
        *(("trainer=deepspeed", f"trainer.zero_stage={stage}") for stage in range(4)),
        ("trainer=deepspeed", "trainer.zero_stage=0", "train.precision=bf16"),
    ],
    ids=lambda words: "-".join(word.partition("=")[2] for word in words),
)
def test_an_engine_goes_on_with_the_settings_of_its_own_run(words: tuple[str, ...], tmp_path: Path) -> None:
    """Also under DeepSpeed, which loads the settings of the run that wrote the checkpoint."""
    batch = {"pixel_values": torch.rand(4, 1, 8, 8), "labels": torch.tensor([1, 2, 3, 4])}

    def engine_of(*more: str) -> TorchEngine | DeepSpeedEngine:
        model = mlp()
        chosen = config("backend=eager", "scheduler=linear", *words, *more)
        engine = wrap(model, chosen, WORKERS, make_task(model, batch), tmp_path)
        assert isinstance(engine, TorchEngine | DeepSpeedEngine)
        return engine

    group = dist.group.WORLD
    assert group is not None
    first = engine_of("optimizer.lr=0.1", "train.steps=4")
    first.micro_step(batch, last=True)
    first.step()
    state = tmp_path / "state"
    state.mkdir()
    first.snapshot(state, shared=True, memory=HostMemory())(group)
    second = engine_of("optimizer.lr=0.01", "optimizer.weight_decay=0.5", "train.clip_grad_norm=0.25", "train.steps=8")
    second.restore(state, 1, tmp_path / "scratch", group)
    assert second.lr == pytest.approx(0.01 * 6 / 7)
    assert [one["lr"] for one in second._optimizer.param_groups] == [second.lr, second.lr]
    assert [one["weight_decay"] for one in second._optimizer.param_groups] == [0.5, 0.0]
    if isinstance(second, DeepSpeedEngine):
        assert getattr(second._engine.optimizer, "clip_grad", 0.25) == 0.25
    second.micro_step(batch, last=True)
    second.step()
    assert second.lr == pytest.approx(0.01 * 5 / 7)


@pytest.mark.parametrize(
    "words",
    [
        ("trainer=single", "backend=eager"),
        ("trainer=ddp", "backend=eager"),
        ("trainer=fsdp", "backend=eager"),
        ("trainer=deepspeed", "backend=eager"),
        pytest.param(("trainer=single", "backend=ort"), marks=pytest.mark.ort),
    ],
    ids=lambda words: "-".join(word.partition("=")[2] for word in words),
)
def test_an_evaluation_leaves_each_module_in_its_mode(words: tuple[str, ...], tmp_path: Path) -> None:
    """A BatchNorm whose statistics are frozen is in evaluation mode while the rest trains."""
    batch = {"pixel_values": torch.rand(4, 1, 8, 8), "labels": torch.tensor([1, 2, 3, 4])}
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 10))
    model[1].eval()
    engine = wrap(model, config(*words), WORKERS, make_task(model, batch), tmp_path)
    with engine.evaluating():
        assert not any(module.training for module in model.modules())
        engine.evaluate(batch)
    assert [model.training, *(module.training for module in model)] == [True, True, False, True]
    assert engine.inner.training
