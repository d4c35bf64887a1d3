"""The proof for GPU machines without a GPU: what fails in it, its runs, and the packages that its bundle brings."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from ortlaunch.cli import dispatch
from ortlaunch.config import devices
from ortlaunch.launch.local import launcher, rules
from tests.gpu.needed import needed, read_machine, read_pins, read_roots, requirements_in
from tests.gpu.proof import watching
from tests.gpu.proof.budget import OutOfTime
from tests.gpu.proof.numbers import OFFLOADED, SMALL, TRAINERS, furthest
from tests.gpu.proof.proof import Check, Failed, NotPossible, judged
from tests.gpu.proof.report import Outcome, Report, Row, Table
from tests.gpu.proof.speed import speed_words
from tests.gpu.proof.survival import KEPT, SLOW
from tests.gpu.proof.watching import PROFILED, WATCHED


@pytest.mark.parametrize(("outcome", "code"), [(one, int(one is Outcome.failed)) for one in Outcome])
def test_only_a_failed_row_makes_exit_code_1(outcome: Outcome, code: int) -> None:
    assert Report("Proof", {}, [Table("First", [Row("a", "b", "c", outcome)])]).exit_code == code


def raising(error: Exception) -> Callable[[], str]:
    def look() -> str:
        raise error

    return look


@pytest.mark.parametrize(
    ("error", "outcome", "seen"),
    [
        (NotPossible("no GPU"), Outcome.not_possible, "no GPU"),
        (OutOfTime("0 s"), Outcome.skipped, "0 s"),
        (Failed("other"), Outcome.failed, "other"),
        (KeyError("loss"), Outcome.failed, "KeyError: 'loss'"),
    ],
)
def test_each_check_becomes_a_row(error: Exception, outcome: Outcome, seen: str) -> None:
    assert judged(Check("a", "b", raising(error))) == Row("a", "b", seen, outcome)


@pytest.mark.parametrize(
    ("lines", "may_be_deepspeeds", "fails"),
    [
        ({}, False, False),
        ({"transformers.masking_utils:755": 39}, True, True),
        ({"deepspeed.runtime.utils:233": 39}, False, True),
        ({"deepspeed.runtime.utils:233": 39}, True, False),
        ({"deepspeed.runtime.utils:233": 39, "ortlaunch.trainer.guard:40": 1}, True, True),
    ],
)
def test_only_deepspeed_may_wait_off_log_steps(lines: dict[str, int], may_be_deepspeeds: bool, fails: bool) -> None:
    with pytest.raises(Failed) if fails else nullcontext():
        watching.judged_syncs(39, Counter(lines), may_be_deepspeeds=may_be_deepspeeds)


def test_losses_are_compared_step_by_step() -> None:
    assert furthest({1: 2.0, 2: 1.0}, {1: 2.0, 2: 1.0}) == "the same 2 losses to the bit"
    assert furthest({1: 2.0, 2: 1.0001}, {1: 2.0, 2: 1.0}) == "furthest 1.0e-04 at step 2"
    for mine in ({1: 2.0, 2: 1.1}, {1: 2.0}, {1: 2.0, 2: float("nan")}):
        with pytest.raises(Failed):
            furthest(mine, {1: 2.0, 2: 1.0})


def installed(wanted: dict[str, str]) -> dict[str, list[str]]:
    return {name: importlib.metadata.requires(name) or [] for name in wanted}


def test_the_bundle_and_a_machine_have_all_that_ortlaunch_needs() -> None:
    machine = read_machine()
    found = needed(read_roots(), machine, read_pins(), installed)
    assert found.conflicts == []
    assert {"deepspeed", "hydra-core", "omegaconf", "antlr4-python3-runtime", "mlflow"} <= found.wheels.keys()
    assert not found.wheels.keys() & machine.keys()
    assert found.wheels["deepspeed"] == read_pins()["deepspeed"]


def test_what_does_not_fit_together_is_named() -> None:
    def of(wanted: dict[str, str]) -> dict[str, list[str]]:
        return {name: ["torch>=2.6", "numpy<2; extra == 'old'", "lost"] for name in wanted}

    found = needed(
        ["Deep_Speed>=0.19", "absent; python_version < '3.12'"], {"torch": "2.5"}, {"deep-speed": "0.19.8"}, of
    )
    assert found.wheels == {"deep-speed": "0.19.8"}
    assert found.conflicts == [
        "deep-speed needs torch>=2.6, and there is torch 2.5",
        "deep-speed needs lost, which constraints.txt does not pin",
    ]


def test_requirements_are_read_from_metadata() -> None:
    text = "Name: a\nRequires-Dist: b>=1 ; extra == 'x'\nRequires-Dist: c\n\nRequires-Dist: not a header\n"
    assert requirements_in(text) == ["b>=1 ; extra == 'x'", "c"]


REQUESTS = {
    "fp16": (*SMALL, *TRAINERS["DeepSpeed ZeRO 2"], "train.precision=fp16"),
    "offload": (*SMALL, *OFFLOADED),
    "profile": PROFILED,
    "syncs": (*WATCHED, *TRAINERS["FSDP2"]),
    "kill": (*KEPT, SLOW),
    "speed": (*speed_words("cuda", Path("text.txt")), "backend=compile"),
}


def test_its_runs_on_cuda_are_requests_that_ortlaunch_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A key that is renamed would otherwise show on a GPU machine alone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_bytes(bytes(10_000))
    for module in (devices, launcher, rules):
        monkeypatch.setattr(module, "visible_gpus", lambda: 1)
    for words in REQUESTS.values():
        common = ("device=cuda", "launcher.workers_per_node=1", "launcher.dry_run=true")
        assert dispatch([*common, *words]) == 0, capsys.readouterr().err
