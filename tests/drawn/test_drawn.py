"""A part of ``make test-drawn``: drawn models train under ONNX Runtime as in PyTorch, or are refused."""

from __future__ import annotations

import textwrap

import pytest
import torch

from tests.drawn.generator import draw
from tests.drawn.runner import judged, judged_source
from tests.drawn.shrink import shrunk
from tests.drawn.verdict import Verdict
from tests.support.nightly import first_in_ci

SEEDS = range(20)

HEAD = """
import os
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.spare = nn.Linear(8, 8)

    def forward(self, x):
        h = x
"""


def source(*lines: str) -> str:
    return HEAD.lstrip() + textwrap.indent("\n".join([*lines, "return h", ""]), "        ")


@pytest.mark.parametrize("seed", first_in_ci(SEEDS, 12), ids=lambda seed: f"seed-{seed}")
def test_a_drawn_model_trains_as_in_pytorch_or_is_refused(seed: int) -> None:
    verdict = judged(seed)
    assert not verdict.is_bad, f"{verdict.outcome}: {verdict.reason}\n{verdict.source}"


def test_a_model_is_a_function_of_its_seed() -> None:
    sources = [draw(seed).source() for seed in range(50)]
    assert sources == [draw(seed).source() for seed in range(50)]
    assert len(set(sources)) == 50


@pytest.mark.parametrize(
    ("line", "outcome"),
    [
        ("h = self.linear(h)", "same"),
        ("if torch.onnx.is_in_onnx_export(): os.abort()", "killed"),
        ("if torch.is_grad_enabled() and len(self.training) > 3: h = h", "invalid"),
    ],
    ids=["same", "killed", "invalid"],
)
def test_each_outcome_is_recognized(line: str, outcome: str) -> None:
    verdict = judged_source(source(line, "h = self.linear(h)"), 0, is_random=False)
    assert verdict.outcome == outcome, verdict.reason


def test_a_difference_beyond_the_noise_is_seen() -> None:
    from tests.drawn.harness import Course, _difference, _errors

    def course(gradient: float, moved: float = 1.0) -> Course:
        return Course([torch.tensor(2.0)], [{"w": torch.tensor([gradient, 1.0])}], {"w": torch.tensor([moved])})

    bounds = [1e-4, 1e-4]
    assert _difference(course(1.00001), course(1.0), bounds) == ""
    assert _difference(course(1.001), course(1.0), bounds).startswith("step 1: gradient of w")
    assert _difference(course(float("nan")), course(1.0), bounds).startswith("step 1: gradient of w")
    assert max(_errors(course(1.0, moved=2.0), course(1.0))) == (1.0, "w")


def test_a_failure_is_shrunk_to_the_lines_that_cause_it() -> None:
    def judged_by_its_text(text: str) -> Verdict:
        return Verdict("wrong" if "h * 3" in text and "return" in text else "same", source=text)

    whole = source("h = self.linear(h)", "for _ in range(2):", "    h = h * 3", "h = h + self.spare(h)")
    small = shrunk(judged_by_its_text(whole), judged_by_its_text).source
    assert small.splitlines()[-3:] == ["        h = x * self.scale", "        h = h * 3", "        return h"]
    assert "nn.Linear" not in small
