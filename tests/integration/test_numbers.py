"""What every trainer computes for models that are unlike most, against plain torch in fp64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ortlaunch.config.trainers import deepspeed
from tests.integration.conftest import Train
from tests.support.pool import Trained
from tests.support.replay import evaluated, replay

TRAINERS = {
    "single": ("trainer=single",),
    "ddp": ("trainer=ddp", "trainer.find_unused_parameters=true"),
    **{f"zero{stage}": ("trainer=deepspeed", f"trainer.zero_stage={stage}") for stage in range(4)},
    "fsdp": ("trainer=fsdp",),
    **{
        f"zero{stage}-offload": ("trainer=deepspeed", f"trainer.zero_stage={stage}", "trainer.offload_optimizer=true")
        for stage in (1, 2, 3)
    },
}
STEPS = 6
RUN = (
    *("data=digits", "backend=eager", "tracking=none", "train.batch_size=8", f"train.steps={STEPS}"),
    *("train.log_every=1", "train.clip_grad_norm=null", "train.checkpoint_every=null"),
    *("scheduler=constant", "scheduler.warmup_steps=0", "optimizer.lr=0.01", "optimizer.weight_decay=0.1"),
    "optimizer.decay_bias_and_norm=true",
)

CASES: dict[str, tuple[str, ...]] = {
    "gaps": ("Gaps",),
    "gaps-sgd": ("Gaps", "optimizer=sgd"),
    "drawn": ("Drawn",),
    "turns": ("Turns", "+model.params.every=1"),
    "turns-accumulated": ("Turns", "+model.params.every=3", "train.grad_accumulation=2"),
}
EVERY_CHANGE = {
    "gaps": ("single", "zero1", "fsdp"),
    "gaps-sgd": ("single",),
    "drawn": ("zero3", "fsdp"),
    "turns": ("zero3", "fsdp"),
    "turns-accumulated": ("zero3", "zero2-offload"),
}
"""The trainers that go ways of their own with a case."""
RESUMED = (("single", "adamw"), ("fsdp", "adamw"))


@pytest.fixture(scope="module", autouse=True)
def offload_is_allowed() -> Iterator[None]:
    """It is refused on the CPU, where there is nothing to move; the way through DeepSpeed is the same as from a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed, "_check_offload", lambda *_: None)
        yield


@pytest.fixture(scope="module")
def run(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trained]:
    folder = tmp_path_factory.mktemp("numbers")

    def trained(trainer: str, net: str, *words: str) -> Trained:
        model = ("model=factory", f"model.target=tests.integration.odd_nets:{net}")
        result = train(folder, *model, *RUN, *TRAINERS[trainer], *words)
        assert result.status == "FINISHED", result.report
        return result

    return trained


def has_right_numbers(result: Trained, trainer: str, begin: int = 0) -> None:
    # The documentation says so: DeepSpeed gives weights that a step does not use a gradient of zeros.
    right = replay(result.run_dir, 1 if trainer == "single" else 2, zeros=trainer.startswith("zero"))
    for name, series in (("train/loss", right.losses), ("train/grad_norm", right.norms)):
        expected = {step: value for step, value in series.items() if step > begin}
        assert result.series(name) == pytest.approx(expected, rel=1e-5), name
    weights = load_file(result.run_dir / "weights" / "model.safetensors")
    apart = {name: float((weight - right.weights[name]).abs().max()) for name, weight in weights.items()}
    assert max(apart.values()) < 1e-5, apart


@pytest.mark.parametrize(
    ("case", "trainer"),
    [
        pytest.param(case, trainer, marks=[pytest.mark.nightly] * (trainer not in EVERY_CHANGE[case]))
        for case in CASES
        for trainer in TRAINERS
    ],
)
def test_every_trainer_computes_what_plain_torch_computes(run: Callable[..., Trained], case: str, trainer: str) -> None:
    has_right_numbers(run(trainer, *CASES[case]), trainer)


@pytest.mark.parametrize(
    ("trainer", "optimizer"),
    [
        pytest.param(trainer, optimizer, marks=[pytest.mark.nightly] * ((trainer, optimizer) not in RESUMED))
        for trainer in TRAINERS
        for optimizer in ("adamw", "sgd")
        if "offload" not in trainer
    ],
)
def test_weights_of_any_strides_go_on_from_a_checkpoint(
    run: Callable[..., Trained], trainer: str, optimizer: str
) -> None:
    words = ("Strides", f"optimizer={optimizer}", "train.checkpoint_every=3")
    whole = run(trainer, *words)
    has_right_numbers(whole, trainer)
    middle = whole.run_dir / "checkpoints" / "step-00000003"
    has_right_numbers(run(trainer, *words, f"train.resume={middle}"), trainer, begin=3)


@pytest.mark.parametrize(
    "trainer",
    [
        pytest.param(one, marks=[pytest.mark.nightly] * (one not in ("ddp", "zero1", "fsdp")))
        for one in TRAINERS
        if "offload" not in one
    ],
)
def test_an_evaluation_takes_the_first_workers_buffers_and_gives_them_back(
    run: Callable[..., Trained], trainer: str
) -> None:
    """Where buffers are views. The model itself says whether each worker has its own again."""
    result = run(trainer, "Views", f"+model.params.is_ddp={str(trainer == 'ddp').lower()}", "train.eval_every=2")
    weights = load_file(result.run_dir / "weights" / "model.safetensors")
    right = evaluated(result.run_dir, 1 if trainer == "single" else 2, weights)
    assert result.series("eval/loss")[STEPS] == pytest.approx(right, rel=1e-5)


def test_a_buffer_that_ddp_cannot_send_is_refused(train: Train, tmp_path: Path) -> None:
    model = ("model=factory", "model.target=tests.integration.odd_nets:Views", "+model.params.is_ddp=false")
    result = train(tmp_path, *model, *RUN, *TRAINERS["ddp"])
    assert result.is_request
    assert "trainer=ddp: several elements of the model's buffer 'row' lie in the same memory" in result.error
