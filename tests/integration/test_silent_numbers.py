"""Models that a run once trained wrongly without a word, or refused needlessly, by the command as users type it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.integration import silent_nets
from tests.integration.conftest import Launch, Result

STEPS = 60
NOISE = 2e-3
"""How far two right losses lie apart after these steps, of the first loss; rounding grows with the steps."""
RUN = ("data=digits", "trainer=single", "device=cpu", f"train.steps={STEPS}", "train.batch_size=32", "tracking=none")
RUN += ("train.log_every=1", "train.eval_every=null", "train.checkpoint_every=null", "optimizer.lr=0.003", "seed=3")

SAME = [
    "SamePadding",
    "IdentityFunction",
    "AddedActivation",
    "AddedMatrix",
    "ScatterAdd",
    "Interpolated mode=nearest",
    "Interpolated mode=bicubic",
    "Power",
    "ReLU6AtTheEdge",
    "FarLogits",
    "NormFirst",
    "NormAfterFrozen",
    "Attention case=detached",
    "Attention case=reused",
    "Cell kind=lstm",
    "Cell kind=gru",
    "IgnoredIndexOfAShape",
    "HiddenIsAnOutput",
    "ScatterReduce",
    "Bag",
    "MaxPool",
    "EncoderLayer dropout=0.0",
]
REFUSED = {
    "HookOfATensor": "registers a hook of a tensor's gradient",
    "WarmsUp steps=20": "each forward changes done",
    "WarmsUp steps=100000": "each forward changes done",
    "MaxNorm": "forward changes the parameter table.weight",
    "ClampedData": "forward changes the parameter last.weight",
    "ClampedWithoutGradients": "forward changes the parameter last.weight",
    "ChangesItsInput": "pixel_values",
    "RareBranch": "int(pixel_values.sum()) % 16 == 3",
}
RANDOM = [
    "EncoderLayer dropout=0.1",
    "Dropped kind=features",
    "Dropped kind=alpha",
    "DroppedLSTM",
    "Sampled",
    "DropPath",
]

pytestmark = pytest.mark.nightly


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(str(silent_nets.__file__), tmp_path / "silent_nets.py")
    return tmp_path


def trained(launch: Launch, folder: Path, case: str, backend: str) -> Result:
    name, *params = case.split()
    model = ["model=factory", f"model.target=silent_nets:{name}", *(f"+model.params.{one}" for one in params)]
    return launch(folder, *model, *RUN, f"backend={backend}")


def are_same(one: Result, other: Result) -> None:
    assert one.returncode == other.returncode == 0, one.report + other.report
    assert len(one.losses) == len(other.losses) == STEPS
    apart = max(abs(one.losses[step] - other.losses[step]) for step in one.losses)
    assert apart < NOISE * abs(other.losses[1]), (apart, one.losses, other.losses)


@pytest.mark.parametrize("case", SAME)
def test_losses_are_those_of_eager(launch: Launch, folder: Path, case: str) -> None:
    are_same(trained(launch, folder, case, "ort"), trained(launch, folder, case, "eager"))


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_graph_cannot_express_is_refused(launch: Launch, folder: Path, case: str) -> None:
    result = trained(launch, folder, case, "ort")
    assert result.returncode == 2, result.report
    assert REFUSED[case] in result.report
    assert "Traceback" not in result.report
    assert trained(launch, folder, case, "eager").returncode == 0


@pytest.mark.parametrize("case", RANDOM)
def test_randomness_is_no_reason_to_refuse(launch: Launch, folder: Path, case: str) -> None:
    """Its draws are ONNX Runtime's own, so that losses agree on the average alone."""
    ort, eager = (trained(launch, folder, case, backend) for backend in ("ort", "eager"))
    assert ort.returncode == eager.returncode == 0, ort.report + eager.report
    means = [sum(list(run.losses.values())[-10:]) / 10 for run in (ort, eager)]
    assert means[0] == pytest.approx(means[1], rel=0.2)
    assert means[1] < 0.8 * eager.losses[1]


@pytest.mark.parametrize("case", ["enclosed", "GlobalValue"])
def test_a_stored_graph_is_not_that_of_another_value(
    launch: Launch, folder: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ""
    for value in ("1.0", "4.0"):
        monkeypatch.setenv("STRENGTH", value)
        words = case if case == "GlobalValue" else f"{case} strength={value}"
        ort = trained(launch, folder, words, "ort")
        are_same(ort, trained(launch, folder, words, "eager"))
        assert str(ort.losses) != first
        first = str(ort.losses)
