"""The memory of a worker where a backend was tried, beside what is traced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from ortlaunch.compose.hydra_tree import compose
from ortlaunch.config.load import to_config
from ortlaunch.estimate.band import MIB, by_trials
from ortlaunch.estimate.ledger import Use
from ortlaunch.estimate.request import Request
from ortlaunch.estimate.study import Study
from ortlaunch.estimate.trace import BESIDE, CHECKPOINT, OTHERS_BESIDE, OTHERS_CHECKPOINT, Parts, Trace

SIZES = {"step": 300, OTHERS_CHECKPOINT: 310, OTHERS_BESIDE: 400, CHECKPOINT: 350, BESIDE: 600}
TRACE = Trace(Parts(0, 0, 0, 0, 0), {name: Use(size * MIB, size * MIB) for name, size in SIZES.items()})
POINTS = [(4, 900 * MIB), (2, 800 * MIB)]


def study_of(backend: str, backends: list[str]) -> Any:
    """A study with trials of ONNX Runtime, and with a trace in the place of its own."""
    study = cast(Any, object.__new__(Study))
    study._config = to_config(compose(["model=mlp", f"backend={backend}", "trainer=ddp", "device=cpu"]))
    study._request = Request(2, 1, None, "", quick=False, tried={"ort": POINTS})
    study._backends = backends
    study._traces = SimpleNamespace(base=400 * MIB, loaders=None)
    return study


def test_a_trial_has_the_copy_of_a_checkpoint_or_not_and_is_that_of_the_largest_worker() -> None:
    study = study_of("ort", ["ort"])
    first, others = (study._whole(study._config, TRACE, is_first=is_first)[1] for is_first in (True, False))
    plain = by_trials(POINTS, 4)
    assert (plain.low - first.low, first.middle, first.high - plain.high) == (250 * MIB, plain.middle, 250 * MIB)
    # Another worker copies less, and need not.
    assert (first.low - others.low, first.middle - others.middle) == (200 * MIB, 200 * MIB)
    assert others.high == first.high


def test_what_may_take_several_backends_has_the_memory_of_the_worst() -> None:
    bands = {}
    for backends in (["eager"], ["ort"], ["eager", "ort"]):
        study = study_of("ort", backends)
        if backends == ["eager"]:
            study._request = Request(2, 1, None, "", quick=False)
        bands[tuple(backends)] = study._whole(study._config, TRACE, is_first=True)[1]
    eager, ort, both = bands.values()
    assert both.low == min(eager.low, ort.low)
    assert (both.middle, both.high) == (max(eager.middle, ort.middle), max(eager.high, ort.high))


@pytest.mark.parametrize("is_first", [True, False])
def test_with_other_activations_than_in_its_trial_a_backend_has_a_factor_on_eager_pytorch(*, is_first: bool) -> None:
    study = study_of("ort", ["ort"])
    changed = to_config(compose(["model=mlp", "backend=ort", "train.activation_checkpointing=true"]))
    found = study._bands(changed, TRACE, is_first=is_first)
    assert list(found) == TRACE.phases_of(is_first=is_first)
