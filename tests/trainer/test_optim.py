"""Learning-rate schedules against values worked out by hand, and optimizers."""

from __future__ import annotations

import re
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import (
    AdafactorConfig,
    AdamWConfig,
    ConstantConfig,
    CosineConfig,
    GroupConfig,
    InverseSqrtConfig,
    LinearConfig,
    ModelConfig,
    OptimizerConfig,
    OptimizerFactoryConfig,
    PolynomialConfig,
    ScheduleFactoryConfig,
    SchedulerConfig,
    SgdConfig,
    WsdConfig,
)
from ortlaunch.models.registry import build_model
from ortlaunch.trainer.engines.fsdp_engine import _without_missing_kernels
from ortlaunch.trainer.optimizers import build_optimizer, freeze, settings_kept, step_if
from ortlaunch.trainer.schedules import build_scheduler


def falling(step: int, total: int, share: float = 0.5) -> float:
    """A schedule of somebody's own; torch asks for the step after the last, too."""
    assert step < total
    return max(0.0, 1 - share * step)


def own_schedule(warmup_steps: int = 0, **params: object) -> ScheduleFactoryConfig:
    return ScheduleFactoryConfig(warmup_steps=warmup_steps, target=f"{__name__}:falling", params=params)


@pytest.mark.parametrize(
    ("cfg", "ratios"),
    [
        (ConstantConfig(), [1.0, 1.0, 1.0, 1.0, 1.0]),
        (ConstantConfig(warmup_steps=3), [0.25, 0.5, 0.75, 1.0, 1.0]),
        (LinearConfig(min_ratio=0.2), [1.0, 0.8, 0.6, 0.4, 0.2]),
        (LinearConfig(warmup_steps=1), [0.5, 1.0, 2 / 3, 1 / 3, 0.0]),
        (CosineConfig(min_ratio=0.0), [1.0, 0.853553, 0.5, 0.146447, 0.0]),
        (WsdConfig(decay_share=0.5, min_ratio=0.2), [1.0, 1.0, 1.0, 0.6, 0.2]),
        (WsdConfig(warmup_steps=1, decay_share=1 / 3), [0.5, 1.0, 1.0, 1.0, 0.0]),
        (PolynomialConfig(power=2), [1.0, 0.5625, 0.25, 0.0625, 0.0]),
        (PolynomialConfig(power=1, min_ratio=0.2), [1.0, 0.8, 0.6, 0.4, 0.2]),
        (InverseSqrtConfig(warmup_steps=2), [1 / 3, 2 / 3, 1.0, 2**0.5 / 3**0.5, 2**0.5 / 2]),
        (InverseSqrtConfig(timescale=1), [1.0, 2**-0.5, 3**-0.5, 0.5, 5**-0.5]),
        (own_schedule(share=0.1), [1.0, 0.9, 0.8, 0.7, 0.6]),
        (own_schedule(warmup_steps=1), [0.5, 0.5, 0.0, -0.0, -0.0]),
    ],
)
def test_a_schedule_over_five_steps(cfg: SchedulerConfig, ratios: list[float]) -> None:
    assert [cfg.factor(done, 5) for done in range(5)] == pytest.approx(ratios, abs=1e-6)


def test_the_schedule_multiplies_the_peak() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = build_optimizer(model, SgdConfig(lr=0.1))
    scheduler = build_scheduler(optimizer, LinearConfig(), steps=2)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    model(torch.ones(1)).backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.0


def none(step: int, total: int) -> None: ...
def one(step: int) -> float: ...


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("falling", {"shares": 1}, "scheduler.params.shares: .* Did you mean scheduler.params.share"),
        ("none", {}, "returned None for step 1 of 2: return a factor"),
        ("one", {}, "takes 1 arguments and is called with 2"),
        ("nothing", {}, "has no 'nothing'"),
    ],
)
def test_a_schedule_that_is_none_is_refused(name: str, params: dict[str, object], words: str) -> None:
    optimizer = build_optimizer(torch.nn.Linear(1, 1), SgdConfig())
    with pytest.raises(RequestError, match=words):
        build_scheduler(optimizer, ScheduleFactoryConfig(target=f"{__name__}:{name}", params=params), steps=2)


def test_frozen_parameters_are_left_out() -> None:
    model = torch.nn.Linear(1, 1)
    model.bias.requires_grad_(False)
    optimizer = build_optimizer(model, AdamWConfig())
    assert [p for group in optimizer.param_groups for p in group["params"]] == [model.weight]


class Mixed(torch.nn.Module):
    """Parameters of every kind that the grouping tells apart."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(3, 4)
        self.linear = torch.nn.Linear(4, 4)
        self.norm = torch.nn.LayerNorm((2, 2))
        self.batch = torch.nn.BatchNorm2d(3)
        self.scale = torch.nn.Parameter(torch.ones(4))
        self.bias = torch.nn.Parameter(torch.ones(2, 2))


def decayed(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> set[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    grouped = [(p, group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(id(parameter) for parameter, _ in grouped) == sorted(names)
    assert {decay for _, decay in grouped} <= {0.0, 0.1}
    return {names[id(parameter)] for parameter, decay in grouped if decay}


@pytest.mark.parametrize("cfg", [AdamWConfig, SgdConfig, AdafactorConfig])
def test_biases_norms_and_vectors_do_not_decay_unless_told_to(cfg: type[OptimizerConfig]) -> None:
    model = Mixed()
    assert decayed(build_optimizer(model, cfg(weight_decay=0.1)), model) == {"embedding.weight", "linear.weight"}
    everything = build_optimizer(model, cfg(weight_decay=0.1, decay_bias_and_norm=True))
    assert decayed(everything, model) == {name for name, _ in model.named_parameters()}


def test_the_first_group_that_matches_a_weight_counts() -> None:
    model = Mixed()
    model.second = model.linear  # Its weights have two names.
    groups = [
        GroupConfig(match="second.*", lr_factor=0.5),
        GroupConfig(match="batch*", frozen=True),
        GroupConfig(match="*.weight", weight_decay=0.3),
        GroupConfig(match="*.bias", lr_factor=2.0),
    ]
    cfg = AdamWConfig(lr=0.1, weight_decay=0.1, groups=groups)
    freeze(model, cfg)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {
        names[id(parameter)]: (group["lr"], group["weight_decay"])
        for group in build_optimizer(model, cfg).param_groups
        for parameter in group["params"]
    }
    assert found == {
        "linear.weight": (0.05, 0.1),
        "linear.bias": (0.05, 0.0),
        "norm.bias": (0.2, 0.0),
        "embedding.weight": (0.1, 0.3),
        "norm.weight": (0.1, 0.3),
        "scale": (0.1, 0.0),
        "bias": (0.1, 0.0),
    }


@pytest.mark.parametrize(
    ("match", "frozen", "words"),
    [
        (
            "*.wieght",
            False,
            "match=*.wieght matches no parameter of the model: its names are scale, bias, emb",
        ),
        ("*", True, "freezes all weights"),
    ],
)
def test_groups_that_do_not_suit_the_model(match: str, frozen: bool, words: str) -> None:
    with pytest.raises(RequestError, match=re.escape(words)):
        freeze(Mixed(), AdamWConfig(groups=[GroupConfig(match=match, frozen=frozen)]))


def test_matrices_by_muon_and_the_rest_by_adamw_are_what_torch_has_with_two_optimizers() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    copy, resumed = deepcopy(model), deepcopy(model)
    groups = [GroupConfig(match="*.weight", target="torch.optim:Muon", lr_factor=3.0, params={"nesterov": False})]
    cfg = AdamWConfig(lr=0.01, weight_decay=0.1, groups=groups)
    matrices, rest = ([one for one in copy.parameters() if one.ndim == ndim] for ndim in (2, 1))
    theirs = (
        torch.optim.Muon(matrices, lr=0.03, weight_decay=0.1, nesterov=False),
        torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    )
    ours, second = build_optimizer(model, cfg), build_optimizer(resumed, cfg)
    for step in range(6):
        if step == 3:
            resumed.load_state_dict(model.state_dict())
            second.load_state_dict(deepcopy(ours.state_dict()))
        for net, optimizers in ((model, [ours]), (copy, theirs), (resumed, [second])):
            net(torch.ones(3)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for one, exact, other in zip(model.parameters(), copy.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, exact) and torch.equal(one, other)
    assert all(set(one.state) == set(net.parameters()) for one, net in ((ours, model), (second, resumed)))


class Plain(torch.optim.Optimizer):
    """An optimizer of somebody's own, without weight decay."""

    def __init__(self, params: object, lr: float) -> None:
        super().__init__(params, {"lr": lr})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                weight.sub_(group["lr"] * self.scaled(weight.grad))

    def scaled(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Normed(Plain):
    """It looks at the whole of a weight."""

    def scaled(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / gradient.norm()


class Counting(Plain):
    """It counts its steps in the group."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] *= 0.5
        super().step()


class Broken(Plain):
    def scaled(self, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("it is broken")


OWN = f"{__name__}:"


@pytest.mark.parametrize(
    ("target", "keys", "words"),
    [
        ("torch.optim:NAdm", {}, "optimizer.target=torch.optim:NAdm: torch.optim has no 'NAdm'. Did you mean NAdam"),
        ("torch.optim:NAdam", {"params": {"momentum_decy": 1}}, "Did you mean optimizer.params.momentum_decay"),
        ("torch.optim:NAdam", {"params": {"lr": 1}}, "optimizer.params.lr: give it by optimizer.lr"),
        ("torch.optim:NAdam", {"params": {"eps": -1.0}}, "cannot be built: Invalid epsilon value: -1.0"),
        ("torch.optim:Rprop", {"weight_decay": 0.1}, "has no weight_decay: set optimizer.weight_decay=0"),
        ("torch.optim:LBFGS", {}, "computes the loss again by a closure"),
        ("torch.optim:SparseAdam", {}, "its step fails on a small weight: SparseAdam does not support dense"),
        ("torch.optim:Muon", {}, "cannot be built: Muon only supports 2D parameters"),
        ("torch.nn:Linear", {}, "is no torch.optim.Optimizer"),
        ("torch:zeros", {}, "torch:zeros cannot be built"),
        (OWN + "Broken", {}, "its step fails on a small weight: it is broken"),
    ],
)
def test_an_optimizer_that_cannot_train_is_refused(target: str, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        build_optimizer(torch.nn.Linear(2, 2), OptimizerFactoryConfig(target=target, **keys))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((f"torch.optim:{name}", "") for name in ("NAdam", "RAdam", "Adamax", "SGD", "Rprop", "RMSprop")),
        (OWN + "Plain", ""),
        *((name, "another way") for name in ("torch.optim:Adafactor", OWN + "Counting")),
        *((name, "moves weights whose gradient is zero") for name in ("torch.optim:ASGD", OWN + "Normed")),
        ("torch.optim:Adagrad", "DeepSpeed makes an Adagrad of its own"),
    ],
)
def test_an_optimizer_that_needs_whole_weights_gets_no_pieces(name: str, reason: str) -> None:
    model, cfg = torch.nn.Linear(2, 2), OptimizerFactoryConfig(target=name)
    build_optimizer(model, cfg)
    with pytest.raises(RequestError, match=f"does not go with ZeRO, .*{reason}") if reason else nullcontext():
        build_optimizer(model, cfg, in_pieces="ZeRO")


def test_a_real_models_groups() -> None:
    model = build_model(ModelConfig(name="gpt2_nano", params={"n_layer": 1, "vocab_size": 16}))
    names = decayed(build_optimizer(model, AdamWConfig(weight_decay=0.1)), model)
    block = {f"transformer.h.0.{part}.weight" for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
    assert names == block | {"transformer.wte.weight", "transformer.wpe.weight"}


@pytest.mark.parametrize(
    ("cfg", "on_device"),
    [
        (AdamWConfig(weight_decay=0.1), False),
        (SgdConfig(weight_decay=0.1), False),
        (AdafactorConfig(), False),
        # By the fused kernels' flag, as on a GPU; torch 2.13 has it in the CPU's, too.
        (AdamWConfig(weight_decay=0.1), True),
        (SgdConfig(weight_decay=0.1), True),
    ],
)
def test_a_step_with_gradients_that_are_not_finite_changes_nothing(cfg: OptimizerConfig, on_device: bool) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = build_optimizer(model, cfg)
    for value, moves in ((1.0, True), (float("nan"), False), (float("inf"), False), (1.0, True)):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        state = [{k: torch.as_tensor(v).clone() for k, v in s.items()} for s in optimizer.state.values()]
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        step_if(optimizer, torch.isfinite(torch.tensor(value)), on_device=on_device)
        assert any(not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)) is moves
        if not moves:
            after = list(optimizer.state.values())
            assert all(torch.equal(a[k], torch.as_tensor(b[k])) for a, b in zip(state, after, strict=True) for k in a)


def test_a_layer_that_is_used_later_trains_with_momentum_as_in_torch() -> None:
    """Its gradients begin when the other one has a momentum, with which the fused kernel alone ends in an error."""

    def trained(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> list[torch.Tensor]:
        for used in (1, 1, 2, 2, 2):
            optimizer.zero_grad()
            torch.nn.Sequential(*list(model)[:used])(torch.ones(4, 3)).square().sum().backward()  # type: ignore[call-overload]
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    copy = deepcopy(model)
    ours = trained(build_optimizer(model, SgdConfig(lr=0.01, weight_decay=0.1, decay_bias_and_norm=True)), model)
    torchs = trained(torch.optim.SGD(copy.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1, fused=False), copy)
    torch.testing.assert_close(ours, torchs)


def test_a_first_step_that_is_skipped_leaves_no_momentum() -> None:
    """In fp16 the first steps overflow until the loss scale is small enough. The kernel skips them by its own flag."""
    model = torch.nn.Linear(3, 1)
    optimizer = build_optimizer(model, SgdConfig(lr=0.1))
    before = model.weight.detach().clone()
    torch.use_deterministic_algorithms(True)  # Memory that nothing is written to is NaN then.
    try:
        for finite, factor in ((False, torch.inf), (True, 1.0)):
            model(torch.ones(3)).backward()
            model.weight.grad.mul_(factor)  # type: ignore[union-attr]
            step_if(optimizer, torch.tensor(finite), on_device=True)
            optimizer.zero_grad()
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(model.weight.detach(), before - 0.1)


def test_adamw_and_sgd_are_torchs_fused_ones() -> None:
    for cfg in (AdamWConfig(), SgdConfig()):
        assert build_optimizer(torch.nn.Linear(1, 1), cfg).defaults["fused"] is True


def a_few_steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, cfg: SchedulerConfig) -> dict[str, object]:
    """The state of a schedule over four steps after three of them."""
    scheduler = build_scheduler(optimizer, cfg, steps=4)
    for _ in range(3):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        scheduler.step()
    return scheduler.state_dict()


def test_a_resumed_optimizer_has_the_settings_of_its_own_run() -> None:
    """A checkpoint also holds those of the run that wrote it: only what steps have made is taken from it."""
    model, shape = torch.nn.Linear(2, 2), CosineConfig()
    first = build_optimizer(model, AdamWConfig(lr=0.1, weight_decay=0.1, beta1=0.5))
    done = a_few_steps(model, first, shape)
    second = build_optimizer(model, AdamWConfig(lr=0.01, weight_decay=0.2))
    scheduler = build_scheduler(second, shape, steps=8)
    with settings_kept(second, scheduler):
        second.load_state_dict(first.state_dict())
        scheduler.load_state_dict(done)
    rate = 0.01 * shape.factor(3, 8)
    assert [group["lr"] for group in second.param_groups] == scheduler.get_last_lr() == [rate, rate]
    assert [group["weight_decay"] for group in second.param_groups] == [0.2, 0.0]
    assert {group["betas"] for group in second.param_groups} == {(0.9, 0.95)}
    assert [float(state["step"]) for state in second.state.values()] == [3.0, 3.0]
    second.step()
    scheduler.step()
    assert scheduler.get_last_lr()[0] == 0.01 * shape.factor(4, 8)


def test_a_kernel_that_this_trainer_lacks_is_not_taken_from_a_checkpoint() -> None:
    """ddp has fused SGD and fsdp has not; both read the same checkpoints."""
    model = torch.nn.Linear(2, 2)
    first = build_optimizer(model, SgdConfig())
    done = a_few_steps(model, first, ConstantConfig())
    second = build_optimizer(model, SgdConfig())
    _without_missing_kernels(second)
    scheduler = build_scheduler(second, ConstantConfig(), steps=8)
    with settings_kept(second, scheduler):
        second.load_state_dict(first.state_dict())
        scheduler.load_state_dict(done)
    assert [group["fused"] for group in second.param_groups] == [False, False]


class Measuring(torch.optim.SGD):
    """An optimizer of somebody else that keeps what it has found in its groups."""


def test_the_state_in_the_groups_of_other_optimizers_is_taken() -> None:
    model = torch.nn.Linear(2, 2)
    first = Measuring(model.parameters(), lr=0.1)
    first.param_groups[0]["found"] = 7
    done = a_few_steps(model, first, ConstantConfig())
    second = Measuring([{"params": list(model.parameters()), "weight_decay": 0.2, "found": 0}], lr=0.01)
    scheduler = build_scheduler(second, ConstantConfig(), steps=4)
    with settings_kept(second, scheduler):
        second.load_state_dict(first.state_dict())
        scheduler.load_state_dict(done)
    (group,) = second.param_groups
    assert (group["found"], group["lr"], group["weight_decay"]) == (7, 0.01, 0.2)
