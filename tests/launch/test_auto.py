"""Which backend a run with ``backend=auto`` takes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from ortlaunch.base.errors import RequestError
from ortlaunch.compose.hydra_tree import compose
from ortlaunch.compose.prepare import prepared
from ortlaunch.config.load import load_config, save_config, to_config
from ortlaunch.config.schema import Config, Device
from ortlaunch.launch import auto
from ortlaunch.launch.auto import best, chosen, keep_rate, recorded, tried_each, why_no_trials
from ortlaunch.launch.kind import kind_of
from ortlaunch.launch.local.machines import wait_for_first
from ortlaunch.launch.plan import LaunchPlan
from ortlaunch.launch.queue.attempt import _decide_backend
from ortlaunch.launch.trial import Outcome
from ortlaunch.run import rates
from ortlaunch.run.making import make_run_folder
from ortlaunch.run.rates import Rate
from ortlaunch.run.run import Run
from ortlaunch.run.state import FIRST_STEP
from ortlaunch.verbs.resume import _configurations

NAMES = ("eager", "compile", "ort")
FAST = {"eager": Rate(0.1, 5.0), "compile": Rate(0.2, 9.0), "ort": Rate(0.05, 10.0)}
SLOW_START = {"eager": Rate(0.1, 5.0), "ort": Rate(0.099, 5.0)}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path))


def config_of(*words: str) -> Config:
    return prepared(to_config(compose(["model=mlp", "device=cpu", "backend=auto", "tracking=none", *words])))


def teach(config: Config, **known: Rate) -> None:
    for name, rate in known.items():
        rates.note(kind_of(config), name, rate, is_sure=True)


def found(outcomes: dict[str, Outcome], steps: int) -> tuple[dict[str, Rate], dict[str, float]]:
    """What trials with these outcomes of a batch of 8 find, and the seconds that each might take."""
    given: dict[str, float] = {}

    def trial(name: str, seconds: float) -> Outcome:
        given[name] = seconds
        return outcomes[name]

    return tried_each(NAMES, steps, 8, trial), given


def ok(step: float, seconds: float = 10.0) -> Outcome:
    return Outcome("ok", seconds, rate=8 / step, start=1.0, first_step=5.0)


@pytest.mark.parametrize(
    ("rated", "steps", "taken"),
    [
        (FAST, 10_000, "ort"),
        # An export is not worth it.
        (FAST, 50, "eager"),
        # A hundredth is no reason.
        (SLOW_START, 10_000, "eager"),
        ({"ort": Rate(1.0, 1.0)}, 100, "ort"),
        ({}, 100, None),
    ],
)
def test_the_run_that_is_over_first_is_taken(rated: dict[str, Rate], steps: int, taken: str | None) -> None:
    assert best(rated, steps) == taken


@pytest.mark.parametrize(
    ("rated", "steps", "why"),
    [
        ({}, 499, "499 steps are too few"),
        ({}, 500, ""),
        ({"eager": Rate(0.001, 5.0)}, 2000, "eager 7.0 s for 2,000 steps, which is too short to pay"),
        ({"eager": Rate(0.1, 5.0)}, 2000, ""),
        # Few steps of a large model.
        ({"eager": Rate(9.0, 5.0)}, 100, ""),
    ],
)
def test_trials_are_made_where_the_run_pays_for_them(rated: dict[str, Rate], steps: int, why: str) -> None:
    said = why_no_trials(rated, 3, steps)
    assert said.startswith(why)
    assert bool(said) == bool(why)


LATE = Outcome("time-out", 60.0, reason="not done after 60 s")
REFUSED = Outcome("refused", 12.0, reason="the graph freezes a decision")
FULL = Outcome("out of memory", 9.0, reason="more than it may have")


@pytest.mark.parametrize(
    ("outcomes", "steps", "tried", "taken"),
    [
        ({"eager": ok(0.1), "compile": ok(0.2), "ort": ok(0.05)}, 2000, 3, "ort"),
        # What hangs or is refused is left out.
        ({"eager": ok(0.1), "compile": LATE, "ort": REFUSED}, 2000, 3, "eager"),
        ({"eager": FULL, "compile": REFUSED, "ort": ok(0.05)}, 2000, 3, "ort"),
        # 15 s of the run do not pay for twice 10 s.
        ({"eager": ok(0.005)}, 2000, 1, "eager"),
        # After 100 s of compiling, 205 s do not pay for as much again.
        ({"eager": ok(0.1), "compile": ok(0.1, seconds=300.0)}, 2000, 2, "eager"),
        # The run itself says what is wrong.
        ({"eager": REFUSED}, 2000, 1, None),
        ({"eager": FULL, "compile": LATE, "ort": FULL}, 2000, 3, None),
    ],
)
def test_trials_show_the_best(outcomes: dict[str, Outcome], steps: int, tried: int, taken: str | None) -> None:
    rated, given = found(outcomes, steps)
    assert list(given) == list(NAMES[:tried])
    assert best({name: rate for name, rate in rated.items() if not rate.unfit}, steps) == taken
    # A trial that hangs costs a share of the run.
    assert all(60 <= seconds <= 600 for seconds in given.values())
    reasons = {name: rate.unfit for name, rate in rated.items() if rate.unfit}
    assert all(outcomes[name].reason in reason for name, reason in reasons.items())


def test_kept_rates_decide_without_trials_and_the_configuration_names_the_backend() -> None:
    config = config_of("train.steps=2000")
    teach(config, eager=FAST["eager"], ort=FAST["ort"], compile=Rate(unfit="its trial was refused: no compiler"))
    taken, why = chosen(config)
    assert taken == dataclasses.replace(config, backend=taken.backend)
    assert taken.backend.name == "ort"
    assert why == (
        "backend=auto takes ort: ort 110 s, eager 205 s for 2,000 steps, by earlier runs of this kind; without "
        "compile: its trial was refused: no compiler"
    )
    assert chosen(config_of("train.steps=50"))[1].startswith("backend=auto takes eager: eager 10 s, ort 12 s")
    assert "too few to pay" in chosen(config_of("train.steps=50", "train.batch_size=3"))[1], "another kind"
    assert chosen(config_of("backend=compile")) == (config_of("backend=compile"), "")


@pytest.mark.parametrize(
    ("words", "backend", "why"),
    [
        (["train.steps=2000"], "eager", "backend=auto would try eager, compile and ort before the workers start"),
        (["train.steps=2000", "trainer=fsdp"], "eager", "backend=auto would try eager and compile before"),
        (["launcher=slurm"], "auto", "backend=auto is decided on the job's first node, before the workers start"),
    ],
)
def test_a_dry_run_makes_no_trial(words: list[str], backend: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "_trial", None)
    config, said = chosen(config_of(*words, "launcher.dry_run=true"))
    assert config.backend.name == backend
    assert said.startswith(why)


def test_trials_are_kept_and_told_and_the_next_run_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = {"eager": ok(0.1), "compile": LATE, "ort": dataclasses.replace(ok(0.05), others=0.5)}
    monkeypatch.setattr(auto, "_trial", lambda config, name, seconds: outcomes.pop(name))
    config, why = chosen(config_of("train.steps=2000"))
    assert config.backend.name == "ort"
    assert why.startswith("backend=auto takes ort: ort 105 s, eager 205 s for 2,000 steps, by trials that took 0 s")
    assert "; other processes had 50% of the cores, so this may be wrong; without compile" in why
    assert why.endswith("; without compile: its trial did not end in time: not done after 60 s")
    assert chosen(config_of("train.steps=3000"))[0].backend.name == "ort"


def queued(tmp_path: Path, *words: str) -> tuple[Config, Run]:
    """A run in the queue, as it is stored."""
    config, run = config_of("launcher=slurm", "train.steps=2000", *words), Run(tmp_path / "run")
    make_run_folder(run.path)
    save_config(config, run.config_file)
    return config, run


def test_a_job_decides_for_all_its_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, run = queued(tmp_path)
    teach(config, **FAST)
    for _ in range(2):
        _decide_backend(run)
        stored = load_config(run.config_file)
        assert stored.backend.name == "ort"
        assert stored == dataclasses.replace(config, backend=stored.backend)
    tags = run.state().tags
    assert tags["ortlaunch.backend"] == "ort"
    assert tags["ortlaunch.backend_reason"].startswith("backend=auto takes ort: ort 110 s")
    assert capsys.readouterr().err.count("backend=auto takes ort") == 1


def test_a_run_whose_workers_had_chosen_keeps_that(tmp_path: Path) -> None:
    config, run = queued(tmp_path)
    assert recorded(config, run) == config
    run.backend_file.write_text(json.dumps({"backend": "compile", "reason": "it was faster", "is_final": True}))
    teach(config, **FAST)
    assert [one.backend.name for one in _configurations(run, [])] == ["compile", "compile"]
    _decide_backend(run)
    assert load_config(run.config_file).backend.name == "compile"
    run.backend_file.write_text('{"backend": "cuda"}')
    assert recorded(config, run) == config


def test_a_further_machine_takes_what_the_first_has_decided(tmp_path: Path) -> None:
    asked, run = config_of(), Run(tmp_path / "run")
    make_run_folder(run.path)
    save_config(auto.with_backend(asked, "ort"), run.config_file)
    run.journal().close()
    wait_for_first(LaunchPlan(asked, run.path, "aaaaaa", "n", 1))
    with pytest.raises(RequestError, match="another configuration: backend"):
        wait_for_first(LaunchPlan(auto.with_backend(asked, "eager"), run.path, "aaaaaa", "n", 1))


@pytest.mark.parametrize(
    ("words", "figures", "kept"),
    [
        (["backend=eager"], {}, {"eager": Rate(0.1, 5.0)}),
        (["backend=ort"], {}, {}),
        (["backend=compile", "backend.mode=max-autotune"], {}, {}),
        (["backend=eager"], {"summary/steady_steps": 2.0}, {}),
        (["backend=eager", "+profile=torch"], {}, {}),
    ],
    ids=["plain", "ort not active", "other keys", "few steps", "profiled"],
)
def test_a_run_that_has_finished_keeps_its_rate(
    tmp_path: Path, words: list[str], figures: dict[str, float], kept: dict[str, Rate]
) -> None:
    config, run = config_of(*words), Run(tmp_path / "run")
    make_run_folder(run.path)
    with run.journal() as journal:
        journal.metrics(1, {FIRST_STEP: 5.0})
        journal.metrics(9, {"summary/step_seconds_p50": 0.1, "summary/steady_steps": 9.0, **figures})
    keep_rate(LaunchPlan(config, run.path, "aaaaaa", "n", 1))
    assert rates.read(kind_of(config_of())) == kept


def test_the_kind_is_of_the_machine_and_not_of_the_backend() -> None:
    assert kind_of(config_of()) == kind_of(config_of("backend=ort", "train.steps=7"))
    assert kind_of(config_of())["machine"][0] == Device.cpu.value
    assert kind_of(config_of("train.batch_size=3")) != kind_of(config_of())
