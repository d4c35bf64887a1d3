"""Sums of large gradients that are written into one of the two, or not made at all."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from ortlaunch.config.schema import OrtConfig, OrtDebugConfig
from ortlaunch.ort import session
from ortlaunch.ort.kernels import gradient_graph
from tests.ort.conftest import operators

WORDS = 11


class Language(torch.nn.Module):
    """Predicts the token itself; the embedding is the output layer, too, where `tied`."""

    def __init__(self, tied: bool = True, padding: int | None = None, frozen: bool = False) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, 8, padding_idx=padding)
        self.hidden = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.embed.weight.requires_grad_(not frozen)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.hidden(self.embed(tokens)).tanh())
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()), logits


CASES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "tied": ({}, {gradient_graph.ADD_ROWS, gradient_graph.ADD_OUTER}),
    "padding": ({"padding": 3}, {gradient_graph.ADD_ROWS, gradient_graph.ADD_OUTER}),
    "untied": ({"tied": False}, {"embedding_backward", gradient_graph.ADD_OUTER}),
    "frozen": ({"tied": False, "frozen": True}, {gradient_graph.ADD_OUTER}),
}


@pytest.mark.parametrize("uses", ["loss", "both", "logits"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_eagers_whatever_is_used_of_the_outputs(case: str, uses: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    options, expected = CASES[case]
    eager = Language(**options)
    debug = OrtDebugConfig(save_onnx=True)
    ort = session.wrap(copy.deepcopy(eager), OrtConfig(debug=debug), threads=2, onnx_dir=tmp_path)
    # The same tokens several times over, among them the one that is padding.
    for size in ((2, 5), (3, 40), (2, 5)):
        tokens = torch.randint(0, WORDS, size)
        tokens[0, :2] = 3
        weights = torch.randn(*size, WORDS)
        for candidate in (eager, ort):
            candidate.zero_grad()
            loss, logits = candidate(tokens)
            outer = (logits * weights).sum()
            {"loss": loss, "both": loss + outer, "logits": outer}[uses].backward()
        of_ort = dict(ort.named_parameters())
        for name, parameter in eager.named_parameters():
            mine = of_ort[name].grad
            assert (mine is None) == (parameter.grad is None), name
            if mine is not None:
                # Sums of 120 rows, in another order.
                largest = float(parameter.grad.abs().max())
                torch.testing.assert_close(mine, parameter.grad, rtol=0.0, atol=1e-5 * largest, msg=name)
    found = operators(tmp_path)
    assert expected <= found
    assert (gradient_graph.ADD_ROWS in found) == (gradient_graph.ADD_ROWS in expected)


def test_gradients_of_two_passes_add_up() -> None:
    """What is written into is this pass's own: the gradient kept from the last one stays."""
    torch.manual_seed(0)
    eager = Language()
    ort = session.wrap(copy.deepcopy(eager), OrtConfig(), threads=2, onnx_dir=None)
    for _ in range(3):
        tokens = torch.randint(0, WORDS, (2, 5))
        for candidate in (eager, ort):
            candidate(tokens)[0].backward()
    torch.testing.assert_close(ort.embed.weight.grad, eager.embed.weight.grad)
