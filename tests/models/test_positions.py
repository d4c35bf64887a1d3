"""No forward of a built-in model makes the host wait for a GPU, and packed sequences stay apart where there are any."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import masking_utils

from ortlaunch.config.schema import ModelConfig
from ortlaunch.models.positions import MadeByModel
from ortlaunch.models.registry import build_model
from ortlaunch.models.task import Batch, make_task
from tests.support.waits import Waits

_SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2},
    "gpt2_nano": {"n_embd": 16, "n_layer": 2, "n_head": 2},
    "llama": {"vocab_size": 64, **_SMALL},
    "bert": {"vocab_size": 64, **_SMALL},
    "vit": {},
    "resnet": {},
    "mlp": {},
}
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])


def built(name: str) -> nn.Module:
    return build_model(ModelConfig(name=name, params=MODELS[name]))


def batch_for(name: str) -> Batch:
    if name in ("vit", "resnet", "mlp"):
        return {"pixel_values": torch.rand(2, 1, 8, 8), "labels": torch.tensor([1, 2])}
    ids = torch.randint(0, 64, (2, 8))
    return {"input_ids": ids, "labels": ids}


@pytest.fixture
def original() -> Iterator[None]:
    """transformers' function as it is, and what this process has put before it again afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        found: Any = masking_utils.find_packed_sequence_indices
        patch.setattr(masking_utils, "find_packed_sequence_indices", getattr(found, "_ortlaunch_original", found))
        yield


@pytest.mark.parametrize("name", MODELS)
def test_no_forward_and_no_backward_makes_the_host_wait(name: str) -> None:
    """transformers asked the GPU in each forward of a causal model whether its batch holds packed sequences."""
    model, batch = built(name), batch_for(name)
    task = make_task(model, batch)
    with Waits() as seen:
        task.loss(model, batch).backward()
        model.eval()
        task.loss(model, batch)
    assert not seen.lines


def test_a_pretrained_model_does_not_make_the_host_wait(tmp_path: Path) -> None:
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**MODELS["gpt2"])).save_pretrained(tmp_path)
    model, batch = build_model(ModelConfig(name="hf", params={"pretrained": str(tmp_path)})), batch_for("gpt2")
    task = make_task(model, batch)
    with Waits() as seen:
        task.loss(model, batch).backward()
    assert not seen.lines


@pytest.mark.usefixtures("original")
def test_waits_are_seen() -> None:
    mask = torch.tensor([True, False])
    with Waits() as seen:
        bool(mask.any())
        mask.float()[mask]
        torch.tensor(1.0)
        masking_utils.find_packed_sequence_indices(POSITIONS)
    assert sum(seen.lines.values()) == 4
    assert [line.partition(":")[0] for line in seen.lines] == [__name__] * 3 + ["transformers.masking_utils"]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.usefixtures("original")
def test_the_numbers_are_those_of_the_question(name: str) -> None:
    model, batch = built(name).eval(), batch_for(name)
    asked = model(**batch).logits
    assert torch.equal(make_task(model, batch).outputs(model, batch).logits, asked)


class Packs(nn.Module):
    """A model of a user's own, which has two sequences in each row."""

    def __init__(self) -> None:
        super().__init__()
        self.part = built("llama")

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.part(input_ids=input_ids, position_ids=POSITIONS.expand(input_ids.shape[0], -1)).logits


def apart(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The logits of both halves, each computed by itself."""
    return torch.cat([model(input_ids=half).logits for half in ids.split(4, dim=1)], dim=1)


@pytest.mark.parametrize("rows", [1, 2])
def test_sequences_that_a_users_model_packs_stay_apart(rows: int) -> None:
    model = Packs().eval()
    batch = {"input_ids": torch.randint(0, 64, (rows, 8))}
    task = make_task(model, batch)
    torch.testing.assert_close(task.outputs(model, batch), apart(model.part, batch["input_ids"]))


def test_sequences_that_a_batch_packs_stay_apart() -> None:
    model = built("llama").eval()
    batch = {"input_ids": torch.randint(0, 64, (1, 8)), "position_ids": POSITIONS}
    task = make_task(model, batch)
    torch.testing.assert_close(task.outputs(model, batch).logits, apart(model, batch["input_ids"]))


def test_positions_that_differ_between_samples_are_looked_at() -> None:
    make_task(built("llama"), batch_for("llama"))
    with MadeByModel():
        assert masking_utils.find_packed_sequence_indices(POSITIONS.repeat(2, 1)) is not None
        assert masking_utils.find_packed_sequence_indices(POSITIONS.expand(2, -1)) is None


def test_another_thread_is_answered_by_transformers() -> None:
    make_task(built("llama"), batch_for("llama"))
    found: list[Any] = []
    with MadeByModel():
        other = threading.Thread(
            target=lambda: found.append(masking_utils.find_packed_sequence_indices(POSITIONS)), daemon=True
        )
        other.start()
        other.join(60)
    assert found[0] is not None
    assert masking_utils.find_packed_sequence_indices(POSITIONS) is not None


def test_a_graph_is_traced_as_transformers_makes_it() -> None:
    """There the question has another answer: nothing is read while a graph is made."""
    make_task(built("llama"), batch_for("llama"))
    with MadeByModel():
        traced = torch.jit.trace(masking_utils.find_packed_sequence_indices, (torch.arange(8)[None],))
        compiled = torch.compile(masking_utils.find_packed_sequence_indices, backend="eager", fullgraph=True)
        assert compiled(torch.arange(8)[None]).tolist() == [[0] * 8]
    assert traced(POSITIONS).tolist() == [[0, 0, 0, 0, 1, 1, 1, 1]]


@pytest.mark.usefixtures("original")
def test_a_version_of_transformers_that_asks_nothing_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(masking_utils, "find_packed_sequence_indices")
    assert make_task(built("llama"), batch_for("llama")).makes_positions
    assert not hasattr(masking_utils, "find_packed_sequence_indices")
