"""ORTModule with ZeRO 3 on two real workers, against eager ZeRO 3: the same losses, gradients and names.

DeepSpeed keeps small parameters and those that are soon used again: both are switched off here, for a model of test
size would otherwise never be freed between forward and backward, and nothing would be tested.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.torchrun import run_probe

_ZERO = "+trainer.config.zero_optimization"
_ALL_FREED = (f"{_ZERO}.stage3_param_persistence_threshold=0", f"{_ZERO}.stage3_max_reuse_distance=0")
_ZERO3 = ("device=cpu", "trainer=deepspeed", "trainer.zero_stage=3", *_ALL_FREED)
_RUN = ("data.seq_len=48", "train.steps=20", "train.log_every=1", "train.batch_size=2", "tracking=none")


def _params(**values: int) -> tuple[str, ...]:
    return tuple(f"model.params.{name}={value}" for name, value in values.items())


FAMILIES: dict[str, tuple[str, ...]] = {
    "gpt2_nano": ("model=gpt2_nano", *_params(n_layer=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)),
    "bert": (
        "model=bert",
        *_params(vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4),
        *_params(intermediate_size=128, hidden_dropout_prob=0, attention_probs_dropout_prob=0),
    ),
    "llama": (
        "model=llama",
        *_params(hidden_size=64, intermediate_size=128, num_hidden_layers=2),
        *_params(num_attention_heads=4, num_key_value_heads=4),
    ),
}
VARIANTS = {"eager": ("backend=eager",), "recompute": ("backend=ort",), "hold": ("backend=ort", "backend.zero3=hold")}
# Dropout inside the blocks alone: outside, the eager parts draw from torch's generator and the blocks' seeds with them.
_DROPOUT = (*FAMILIES["gpt2_nano"], "model.params.resid_pdrop=0.3")
TABLE: dict[str, tuple[str, ...]] = {
    f"gpt2_nano-{variant}": (*FAMILIES["gpt2_nano"], *chosen, *_ZERO3, *_RUN) for variant, chosen in VARIANTS.items()
}
TABLE |= {f"dropout-{mode}": (*_DROPOUT, *VARIANTS[mode], *_ZERO3, *_RUN) for mode in ("recompute", "hold")}
TABLE["accumulated-recompute"] = (*TABLE["gpt2_nano-recompute"], "train.batch_size=1", "train.grad_accumulation=2")


@pytest.fixture(scope="module")
def runs(table_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return table_of(tmp_path_factory.mktemp("zero3"), TABLE)


@pytest.fixture(scope="module")
def one_backward(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Loss, gradients and names by family and variant, from two workers under torchrun; of what is tested now."""
    out = tmp_path_factory.mktemp("gradients") / "results.pt"
    items = [item for item in request.session.items if item.module is request.module]
    here = [item.callspec.params for item in items if hasattr(item, "callspec")]
    wanted = [family for family in FAMILIES if any(params.get("family") == family for params in here)]
    run_probe(
        Path(__file__).with_name("zero3_gradients.py"),
        out,
        *(",".join((*_ZERO3, *FAMILIES[family])) for family in wanted),
    )
    return dict(zip(wanted, torch.load(out).values(), strict=True))


CASES = [pytest.param(family, marks=[pytest.mark.nightly] * (family != "gpt2_nano")) for family in FAMILIES]


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["recompute", "hold"])
def test_the_losses_are_eagers(runs: Any, mode: str) -> None:
    """At each of 20 steps. CI has one backward in both modes, and five steps of a model of one's own, below."""
    eager, ort = runs["gpt2_nano-eager"], runs[f"gpt2_nano-{mode}"]
    assert eager.status == "FINISHED", eager.report
    assert ort.status == "FINISHED", ort.report
    assert ort.tags["ortlaunch.ort_active"] == "true"
    assert eager.tags["ortlaunch.ort_active"] == "false"
    assert len(eager.losses) == 20
    assert ort.losses == pytest.approx(eager.losses, rel=1e-5)
    assert eager.losses[20] < 0.97 * eager.losses[1]


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["recompute", "hold"])
def test_workers_end_without_an_abort(launch: Any, tmp_path: Path, mode: str) -> None:
    result = launch(tmp_path, *TABLE[f"dropout-{mode}"], "train.steps=2")
    assert result.returncode == 0, result.report
    for rank in (0, 1):
        log = result.log(rank)
        for words in ("terminate called", "Aborted", "core dumped", "Traceback"):
            assert words not in log


def test_dropout_inside_the_blocks_is_the_same_in_both_passes(runs: Any) -> None:
    """Holding runs each block once. Recomputing runs it twice, and learns the same only if the masks were the same."""
    recompute, hold = runs["dropout-recompute"], runs["dropout-hold"]
    assert recompute.losses == pytest.approx(hold.losses, rel=1e-5)
    # Without dropout the losses are those of eager.
    without = runs["gpt2_nano-eager"].losses
    assert all(abs(recompute.losses[step] - without[step]) > 1e-4 for step in (2, 10, 20))


@pytest.mark.nightly
def test_accumulated_micro_batches_compute_what_one_batch_computes(runs: Any) -> None:
    """At each of 20 steps, those of eager ZeRO 3. CI has one backward and a model of one's own, below."""
    accumulated, whole = runs["accumulated-recompute"], runs["gpt2_nano-eager"]
    assert whole.status == "FINISHED", whole.report
    assert accumulated.status == "FINISHED", accumulated.report
    assert accumulated.tags["ortlaunch.ort_active"] == "true"
    assert whole.tags["ortlaunch.ort_active"] == "false"
    assert len(whole.losses) == 20
    assert accumulated.losses == pytest.approx(whole.losses, rel=1e-5)
    assert whole.losses[20] < 0.97 * whole.losses[1]


@pytest.mark.parametrize("mode", ["recompute", "hold"])
@pytest.mark.parametrize("family", CASES)
def test_the_gradients_are_eagers(one_backward: dict[str, dict[str, Any]], family: str, mode: str) -> None:
    eager, ort = one_backward[family]["eager"], one_backward[family][mode]
    assert ort["loss"] == pytest.approx(eager["loss"], rel=1e-6)
    assert ort["gradients"].keys() == eager["gradients"].keys()
    largest = max(gradient.abs().max() for gradient in eager["gradients"].values())
    for name, gradient in eager["gradients"].items():
        # Some are zero but for rounding, such as that of an attention key's bias.
        torch.testing.assert_close(ort["gradients"][name], gradient, rtol=1e-4, atol=1e-6 * float(largest), msg=name)


@pytest.mark.parametrize("mode", ["recompute", "hold"])
@pytest.mark.parametrize("family", CASES)
def test_the_gathered_state_dict_has_the_plain_models_keys(
    one_backward: dict[str, dict[str, Any]], family: str, mode: str
) -> None:
    result = one_backward[family][mode]
    assert len(result["plain"]) > 20
    assert sorted(result["consolidated"]) == sorted(result["plain"])


def test_a_model_without_repeated_blocks_is_a_wrong_request(tmp_path: Path, train: Any) -> None:
    result = train(tmp_path, "model=mlp", *_ZERO3, "train.steps=1", "tracking=none")
    assert result.is_request, result.report
    assert "no repeated blocks" in result.error


# What is data has no gradient, which is a case of its own where blocks are run again in the backward.
@pytest.mark.parametrize("mode", ["recompute", pytest.param("hold", marks=pytest.mark.nightly)])
def test_a_users_own_model_runs_on_the_blocks_that_are_named(
    own_eager: Any, tmp_path: Path, train: Any, mode: str
) -> None:
    """Its blocks are called by keyword, and the first one's input is data, which needs no gradient."""
    (tmp_path / "mine.py").write_text(_OWN_MODEL)
    result = train(tmp_path, *_OWN_RUN, *VARIANTS[mode], "backend.blocks=stages.*")
    assert result.status == "FINISHED", result.report
    assert result.tags["ortlaunch.ort_active"] == "true"
    assert result.losses == pytest.approx(own_eager.losses, rel=1e-5)


@pytest.fixture(scope="module")
def own_eager(tmp_path_factory: pytest.TempPathFactory, train: Any) -> Any:
    folder = tmp_path_factory.mktemp("own")
    (folder / "mine.py").write_text(_OWN_MODEL)
    result = train(folder, *_OWN_RUN, "backend=eager")
    assert result.status == "FINISHED", result.report
    return result


_OWN_RUN = (
    *("model=factory", "model.target=mine:Net", "data=digits", *_ZERO3),
    *("train.steps=5", "train.log_every=1", "tracking=none", "optimizer.lr=0.01"),
)
_OWN_MODEL = """
from torch import nn


class Stage(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, 32)

    def forward(self, features):
        return self.linear(features).relu()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.Sequential(Stage(64), Stage(32))
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        x = x.flatten(1)
        for stage in self.stages:
            x = stage(features=x)
        return self.head(x)
"""
