"""What `check_model` lets through and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ortlaunch.base.errors import RequestError
from ortlaunch.models.checks import check_model, check_precision


class Holder(nn.Module):
    """Holds another module as `inner`, beside a weight of its own."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.own = nn.Linear(2, 2)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(x)


def foreign(name: str, module: str) -> type[nn.Module]:
    """A module class that says it comes from another package, and a subclass of it."""
    base = type(name, (nn.Module,), {"__module__": module})
    return type("Mine", (base,), {"__module__": "user.code"})


def test_plain_model_passes() -> None:
    check_model(Holder(nn.LSTM(2, 2)))


def test_weight_norm_passes() -> None:
    check_model(Holder(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))))
    check_model(Holder(nn.utils.weight_norm(nn.Linear(2, 2))))


@pytest.mark.parametrize("wrong", [{"a": 1}, None, nn.Linear, lambda x: x])
def test_not_a_module(wrong: Any) -> None:
    with pytest.raises(RequestError, match=r"not a torch.nn.Module.*model.target"):
        check_model(wrong)


def test_no_parameters() -> None:
    with pytest.raises(RequestError, match="ReLU has no parameters"):
        check_model(nn.ReLU())


def test_nothing_trainable() -> None:
    with pytest.raises(RequestError, match="all 2 have requires_grad=False"):
        check_model(nn.Linear(2, 2).requires_grad_(False))


@pytest.mark.parametrize("inside", [False, True])
def test_data_parallel(inside: bool) -> None:
    model: nn.Module = nn.DataParallel(nn.Linear(2, 2))
    with pytest.raises(RequestError, match=r"torch.nn.DataParallel.*DistributedDataParallel.*trainer=ddp"):
        check_model(Holder(nn.Sequential(model)) if inside else model)


def test_place_of_an_inner_wrapper_is_named() -> None:
    with pytest.raises(RequestError, match=r"at 'inner\.1'"):
        check_model(Holder(nn.Sequential(nn.ReLU(), nn.DataParallel(nn.Linear(2, 2)))))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("ORTModule", "onnxruntime.training.ortmodule.ortmodule"),
        ("ORTModule", "torch_ort"),
        ("DeepSpeedEngine", "deepspeed.runtime.engine"),
        ("FullyShardedDataParallel", "torch.distributed.fsdp.fully_sharded_data_parallel"),
    ],
)
def test_foreign_wrappers(name: str, module: str, inside: bool) -> None:
    wrapper = foreign(name, module)()
    with pytest.raises(RequestError, match=f"already wrapped in {name}"):
        check_model(Holder(wrapper) if inside else wrapper)


def test_own_class_of_a_wrappers_name_passes() -> None:
    check_model(Holder(foreign("ORTModule", "user.models")()))


@pytest.fixture
def one_worker_group(tmp_path: Any) -> Any:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_real_ddp(one_worker_group: None) -> None:
    with pytest.raises(RequestError, match="already wrapped in DistributedDataParallel"):
        check_model(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))


def test_real_fsdp2(one_worker_group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(2, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(RequestError, match="already wrapped in FSDPModule"):
        check_model(model)


@pytest.mark.parametrize("inside", [False, True])
def test_compiled(inside: bool) -> None:
    model = torch.compile(nn.Linear(2, 2))
    with pytest.raises(RequestError, match=r"OptimizedModule.*backend="):
        check_model(Holder(model) if inside else model)


def test_compiled_in_place() -> None:
    model = nn.Linear(2, 2)
    model.compile()
    with pytest.raises(RequestError, match=r"torch\.compile"):
        check_model(Holder(model))


@pytest.mark.parametrize(
    "hidden",
    [
        [nn.Linear(2, 2)],
        {"a": nn.Linear(2, 2)},
        (torch.zeros(2, requires_grad=True),),
        torch.zeros(2, requires_grad=True),
    ],
)
def test_weights_out_of_sight(hidden: Any) -> None:
    model = Holder(Holder())
    model.inner.layers = hidden
    with pytest.raises(RequestError, match=r"'inner\.layers'.*never be trained.*ModuleList"):
        check_model(model)


def test_second_reference_and_frozen_helper_pass() -> None:
    model = Holder()
    model.again = [model.own, model.own.weight]
    model.teacher = [nn.Linear(2, 2).requires_grad_(False)]
    check_model(model)


def test_weights_without_a_size() -> None:
    with pytest.raises(RequestError, match=r"'inner\.weight' has no size before the first forward"):
        check_model(Holder(nn.LazyLinear(2)))
    model = Holder(nn.LazyLinear(2))
    assert model.inner is not None
    model.inner(torch.zeros(1, 3))
    check_model(model)


def test_weights_in_half_precision_are_refused_where_they_are_trained() -> None:
    """As `from_pretrained` returns a model whose files are in bf16: an update of a thousandth would be lost."""
    model = Holder(nn.Linear(2, 2).bfloat16().requires_grad_(False))
    check_precision(model)
    check_precision(Holder(nn.Linear(2, 2).double()))
    model.inner.requires_grad_(True)  # type: ignore[union-attr]
    with pytest.raises(RequestError, match=r"'inner\.weight' is in bfloat16.*dtype=torch\.float32"):
        check_precision(model)


def parts(*, overlap: int) -> Holder:
    """Two weights that are parts of one tensor, with some rows in common."""
    model, memory = Holder(), torch.randn(4, 4)
    model.a, model.b = nn.Parameter(memory[:2, :3]), nn.Parameter(memory[2 - overlap :, 1:])
    return model


def test_weights_in_one_memory() -> None:
    check_model(parts(overlap=0))
    with pytest.raises(RequestError, match=r"weights 'a' and 'b' lie in the same memory.*\.clone\(\)"):
        check_model(parts(overlap=1))
    frozen = parts(overlap=1).requires_grad_(False)
    frozen.own.requires_grad_(True)
    check_model(frozen)


def test_a_weight_on_top_of_itself() -> None:
    model = Holder()
    model.own.weight = nn.Parameter(torch.ones(2, 1).expand(2, 2))
    with pytest.raises(RequestError, match=r"'own\.weight' lie in the same memory.*expand it in forward"):
        check_model(model)
