"""Dropout of our own kernels: the share asked for, governed by torch's generator, the same in forward and backward."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from ortlaunch.config.schema import ModelConfig, OrtConfig, OrtDebugConfig
from ortlaunch.models.registry import build_model
from ortlaunch.ort import session
from tests.ort.conftest import operators

RATE = 0.3


class Drop(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 16)
        self.factors: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return functional.dropout(hidden, RATE, self.training) if self.factors is None else hidden * self.factors


class Attend(torch.nn.Module):
    """Attention over one projection, as GPT-2 has it, over three, and with heads shared among queries."""

    def __init__(self, kind: str, rate: float = RATE) -> None:
        super().__init__()
        self.kind, self.rate = kind, rate
        self.project = torch.nn.Linear(16, 48)
        self.factors: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        three = self.project(x).split(16, dim=2)
        if self.kind == "permuted":
            three = (three[1], three[0], three[2])
        if self.kind in ("packed", "permuted", "masked"):
            query, key, value = (part.view(batch, length, -1, 4).transpose(1, 2) for part in three)
        elif self.kind == "swapped":
            # The same sizes another way round: no head's numbers lie side by side.
            query, key, value = (part.view(batch, length, 4, 4).transpose(2, 3).transpose(1, 2) for part in three)
        else:
            shared = 8 if self.kind == "grouped" else 16
            query = three[0].view(batch, length, 4, 4).transpose(1, 2)
            key, value = (part[..., :shared].view(batch, length, -1, 4).transpose(1, 2) for part in three[1:])
        if self.kind == "scaled":
            query = query * 1.5
        mask = None
        if self.kind == "masked":
            mask = (x[:, None, None, :, 0] > -1) & torch.ones(length, length, dtype=torch.bool).tril()
        if self.factors is None:
            out = functional.scaled_dot_product_attention(
                query,
                key,
                value,
                mask,
                self.rate if self.training else 0.0,
                is_causal=mask is None,
                enable_gqa=self.kind == "grouped",
            )
        else:
            out = self.by_hand(query, key, value, mask)
        return out.transpose(1, 2).reshape(batch, length, 16)

    def by_hand(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril() if mask is None else mask
        scores = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).masked_fill(~seen, -1e30)
        weights = scores.softmax(-1) * seen
        return (weights * self.factors) @ value


def wrapped(model: torch.nn.Module, folder: Path | None = None) -> torch.nn.Module:
    debug = OrtDebugConfig(save_onnx=folder is not None)
    return session.wrap(model, OrtConfig(debug=debug), threads=2, onnx_dir=folder)


def factors(seed: int, batch: int, heads: int, length: int) -> torch.Tensor:
    """What attention multiplies its weights by, read from weights that are all alike."""
    torch.manual_seed(seed)
    nothing = torch.zeros(batch, heads, length, length)
    picks = torch.eye(length).expand(batch, heads, length, length).contiguous()
    out, _, _ = torch.ops.ortlaunch.attention(nothing, nothing, picks, None, RATE, False, None)
    return out * length


def gradients(model: torch.nn.Module, outputs: torch.Tensor, direction: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    outputs.backward(direction)
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_what_is_dropped_is_dropped_in_the_gradients() -> None:
    torch.manual_seed(0)
    eager = Drop()
    ort = wrapped(copy.deepcopy(eager))
    for length in (5, 700):
        x = torch.randn(3, length, 16)
        actual = ort(x)
        kept = actual != 0
        assert kept.float().mean() == pytest.approx(1 - RATE, abs=0.15 if length == 5 else 0.02)
        eager.factors = kept / (1 - RATE)
        expected = eager(x)
        torch.testing.assert_close(actual, expected)
        direction = torch.randn_like(expected)
        for mine, theirs in zip(gradients(ort, actual, direction), gradients(eager, expected, direction), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["packed", "permuted", "swapped", "separate", "grouped", "masked", "scaled"])
def test_attention_drops_weights_and_has_the_gradients_of_that(kind: str) -> None:
    torch.manual_seed(0)
    eager = Attend(kind)
    ort = wrapped(copy.deepcopy(eager))
    ort(torch.randn(2, 9, 16))
    for batch, length in ((2, 9), (3, 70), (1, 130)):
        x = torch.randn(batch, length, 16)
        eager.factors = factors(length, batch, 4, length)
        torch.manual_seed(length)
        actual, expected = ort(x), eager(x)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        direction = torch.randn_like(expected)
        for mine, theirs in zip(gradients(ort, actual, direction), gradients(eager, expected, direction), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "operator"),
    [
        ("packed", "attention_packed"),
        ("masked", "attention_packed"),
        ("permuted", "attention_sideways"),
        ("swapped", "attention_sideways"),
        ("separate", "attention_sideways"),
        ("grouped", "attention_sideways"),
        ("scaled", "attention"),
    ],
)
def test_attention_is_one_node(kind: str, operator: str, tmp_path: Path) -> None:
    wrapped(Attend(kind), tmp_path)(torch.randn(2, 9, 16)).sum().backward()
    found = operators(tmp_path)
    assert f"ortlaunch::{operator}" in found
    assert f"ortlaunch::{operator}_backward" in found
    assert not found & {"Softmax", "Split" if operator == "attention_packed" else "Softmax"}


@pytest.mark.parametrize("kind", ["packed", "grouped", "masked"])
def test_double_precision(kind: str) -> None:
    torch.manual_seed(0)
    eager = Attend(kind).double()
    ort = wrapped(copy.deepcopy(eager))
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    ort(x)
    eager.factors = factors(7, 2, 4, 9).double()
    torch.manual_seed(7)
    actual, expected = ort(x), eager(x)
    # The factor 1 / (1 - p) is fp32.
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    direction = torch.randn_like(expected)
    for mine, theirs in zip(gradients(ort, actual, direction), gradients(eager, expected, direction), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("model", [Drop(), Attend("packed")], ids=["dropout", "attention"])
def test_torchs_generator_governs_it(model: torch.nn.Module) -> None:
    ort = wrapped(copy.deepcopy(model))
    x = torch.randn(2, 40, 16)
    ort(x)
    torch.manual_seed(3)
    first, state, second = ort(x), torch.get_rng_state(), ort(x)
    assert not torch.equal(first, second)
    torch.set_rng_state(state)
    assert torch.equal(ort(x), second)
    torch.manual_seed(3)
    assert torch.equal(ort(x), first)
    # Neighbouring seeds, as ranks have them, drop independently.
    torch.manual_seed(4)
    assert not torch.equal(ort(x), first)


def test_in_evaluation_nothing_is_dropped() -> None:
    eager = Attend("packed").eval()
    ort = wrapped(copy.deepcopy(eager))
    x = torch.randn(2, 9, 16)
    torch.testing.assert_close(ort(x), eager(x))


def test_draws_are_independent_of_place_row_and_seed() -> None:
    """Shares and correlations within five standard deviations of chance."""
    session.import_ortmodule()
    ones = torch.ones(1 << 20)
    drawn = torch.stack([torch.ops.ortlaunch.dropout(ones, 0.5)[0] != 0 for _ in range(4)]).float() - 0.5
    bound = 5 / ones.numel() ** 0.5
    assert drawn.mean(1).abs().max() < bound / 2
    spread = drawn.flatten()
    for step in (1, 2, 15, 16, 63, 64, 4096):
        assert (spread[:-step] * spread[step:]).mean().abs() < bound / 4
    across = drawn @ drawn.t() / ones.numel() - torch.eye(4) / 4
    assert across.abs().max() < bound / 4


def test_the_number_of_threads_does_not_change_what_is_dropped() -> None:
    session.import_ortmodule()
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            found.append(torch.ops.ortlaunch.dropout(torch.ones(100_003), 0.1)[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def threefry(seed: int, row: int, counter: int) -> tuple[int, int, int, int]:
    """Threefry-4x32 with twelve rounds, by its definition."""
    low, high = seed % 2**32, seed >> 32
    keys = (low, high, 0, 0, 0x1BD11BDA ^ low ^ high)
    words = [(x + key) % 2**32 for x, key in zip((counter, row % 2**32, row >> 32, 0), keys[:4], strict=True)]
    turns = ((10, 26), (11, 21), (13, 27), (23, 5), (6, 20), (17, 11), (25, 10), (18, 20))
    for number in range(12):
        pairs = ((0, 1), (2, 3)) if number % 2 == 0 else ((0, 3), (2, 1))
        for (x, y), bits in zip(pairs, turns[number % 8], strict=True):
            words[x] = (words[x] + words[y]) % 2**32
            words[y] = (words[y] << bits | words[y] >> 32 - bits) % 2**32 ^ words[x]
        if number % 4 == 3:
            step = number // 4 + 1
            words = [(x + keys[(step + place) % 5] + step * (place == 3)) % 2**32 for place, x in enumerate(words)]
    return words[0], words[1], words[2], words[3]


def test_every_processor_drops_the_same_elements() -> None:
    """The kernels work in vectors as wide as the processor's; a run may go on on another machine."""
    session.import_ortmodule()
    session.extension.load_kernels()
    seed, rate = 0x0123456789ABCDEF, 0.5
    factors = torch.ops.ortlaunch.dropout_backward(torch.ones(4096 + 200), torch.tensor(seed), rate)
    for place in (*range(130), *range(4096, 4096 + 200)):
        row, inside = divmod(place, 4096)
        block, rest = divmod(inside, 64)
        word = threefry(seed, row, 16 * block + rest % 16)[rest // 16]
        assert factors[place] == (2.0 if word >= rate * 2**32 else 0.0), place


def test_gpt2_learns_with_its_dropout_as_eager_does() -> None:
    """Other elements are dropped, so only the course of the loss is the same."""
    torch.manual_seed(0)
    model = build_model(ModelConfig(name="gpt2_nano"))
    assert model.config.resid_pdrop == model.config.attn_pdrop == model.config.embd_pdrop == 0.1
    ids = torch.randint(0, 256, (4, 64))
    last = {}
    for name, candidate in (("eager", copy.deepcopy(model)), ("ort", wrapped(copy.deepcopy(model)))):
        optimizer = torch.optim.AdamW(candidate.parameters(), lr=1e-3)
        for _ in range(40):
            loss = candidate(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        last[name] = loss.item()
    assert last["eager"] < 4.5
    assert last["ort"] == pytest.approx(last["eager"], abs=0.15)
