"""What people read of an estimate."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ortlaunch.estimate.render import _conclusions, render

MIB = 2**20
PARTS = (
    *("base_bytes", "parameters_bytes", "gradients_bytes", "optimizer_state_bytes"),
    *("trainer_buffers_bytes", "activations_bytes", "allocator_bytes"),
)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 MiB"), (80_000, "under 1 MiB"), (3 * MIB, "3 MiB"), (2**31, "2.00 GiB")]
)
def test_what_a_small_model_holds_does_not_look_overlooked(size: int, text: str) -> None:
    band = dict.fromkeys(("low_bytes", "peak_bytes", "high_bytes"), 400 * MIB)
    report = {
        "model": "mlp",
        "backend": "eager",
        "trainer": "ddp",
        "precision": "fp32",
        "batch_size": 4,
        "note": "",
        "world_size": 1,
        "method": "fake tensors",
        "verdict": "fits",
        "device": "cpu",
        "workers": [{"parts": {**dict.fromkeys(PARTS, 0), "gradients_bytes": size}, "phases": {"step": band}}],
        "machine": {**band, "limit_bytes": None, "limit_source": "", "compilers_bytes": 0, "loaders_bytes": 0},
        "checkpointing_saves_bytes": None,
        "largest_batch_size": None,
        "largest_batch_is_all": False,
        "change": "",
    }
    out = io.StringIO()
    render(report, Console(file=out, width=120))
    (line,) = (line for line in out.getvalue().splitlines() if line.strip().startswith("gradients"))
    assert line.split(maxsplit=1)[1].strip() == text


@pytest.mark.parametrize(("saved", "text"), [(3 * MIB, "3 MiB of a worker's step"), (0, "nothing")])
def test_checkpointing_that_saves_nothing_is_said_to(saved: int, text: str) -> None:
    names = ("low_bytes", "peak_bytes", "high_bytes", "limit_bytes", "compilers_bytes", "loaders_bytes")
    machine = {**dict.fromkeys(names, 0), "limit_source": "--memory"}
    nothing = dict.fromkeys(("largest_batch_size", "change"))
    report = {**nothing, "machine": machine, "workers": [{}], "device": "cpu", "checkpointing_saves_bytes": saved}
    assert f"train.activation_checkpointing=true would save {text}" in _conclusions(report)
