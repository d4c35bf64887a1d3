"""Which backend a run with backend=auto takes, by what is known of each."""

from __future__ import annotations

import random

import pytest

from ortlaunch.trainer.auto.decision import (
    BACKENDS,
    MARGIN,
    SHARE,
    Near,
    Plan,
    Rate,
    as_now,
    begin,
    conclude,
    plan_trials,
)

NO_ORT = {"ort": "it needs onnxruntime-training, which is not installed"}
ALL = {"eager": Rate(0.10, 5.0), "compile": Rate(0.08, 30.0), "ort": Rate(0.05, 8.0)}


@pytest.mark.parametrize(
    ("steps", "backend"), [(10, "eager"), (59, "eager"), (65, "ort"), (10_000, "ort")], ids=lambda value: str(value)
)
def test_a_start_that_the_steps_do_not_pay_for_is_not_taken(steps: int, backend: str) -> None:
    choice = begin(ALL, {}, steps)
    assert (choice.backend, choice.is_final) == (backend, True)
    assert f"{steps:,} steps by earlier runs" in choice.reason


def test_of_two_that_are_equally_fast_the_simpler_one_is_taken() -> None:
    near = {name: Rate(0.1 * (1 - 0.5 * MARGIN * index), 5.0) for index, name in enumerate(BACKENDS)}
    assert begin(near, {}, 1000).backend == "eager"


def test_without_any_rate_a_run_begins_with_eager_and_is_not_decided() -> None:
    choice = begin({}, NO_ORT, 1000)
    assert (choice.backend, choice.is_final) == ("eager", False)
    assert choice.reason.endswith("; without ort: it needs onnxruntime-training, which is not installed")


def test_the_best_of_some_rates_is_begun_with_and_not_decided() -> None:
    choice = begin({"eager": ALL["eager"], "ort": ALL["ort"]}, {}, 1000)
    assert (choice.backend, choice.is_final) == ("ort", False)


def test_a_run_that_would_start_for_longer_than_it_trains_begins_with_eager() -> None:
    known = {"ort": ALL["ort"]}
    assert [begin(known, {}, steps).backend for steps in (159, 161)] == ["eager", "ort"]
    assert not begin(known, {}, 159).is_final


EAGER_AND_ORT = {"eager": Rate(0.10, 5.0), "ort": Rate(0.05, 8.0)}


@pytest.mark.parametrize(
    ("known", "near", "steps", "backend"),
    [
        ({}, Near(EAGER_AND_ORT, 4.0), 500, "ort"),
        # A step with a tenth of the work may take a tenth of the time, which would not pay for the start of ORT.
        ({}, Near(EAGER_AND_ORT, 0.1), 500, "eager"),
        ({}, Near({"ort": Rate(0.05, 8.0)}, 4.0), 500, "eager"),
        ({}, Near({**EAGER_AND_ORT, "ort": Rate(0.088, 5.0)}, 4.0), 5000, "ort"),
        ({}, Near({**EAGER_AND_ORT, "ort": Rate(0.092, 5.0)}, 4.0), 5000, "eager"),
        ({"eager": Rate(0.4, 5.0)}, Near(EAGER_AND_ORT, 4.0), 16, "eager"),
        ({"eager": Rate(0.4, 5.0)}, Near(EAGER_AND_ORT, 4.0), 30, "ort"),
        ({"eager": Rate(0.4, 5.0), "ort": Rate(0.5, 8.0)}, Near(EAGER_AND_ORT, 4.0), 500, "eager"),
        ({"ort": Rate(unfit="a branch is frozen")}, Near(EAGER_AND_ORT, 4.0), 500, "eager"),
    ],
)
def test_runs_with_another_batch_say_what_to_begin_with(
    known: dict[str, Rate], near: Near, steps: int, backend: str
) -> None:
    choice = begin(known, {}, steps, [near])
    assert (choice.backend, choice.is_final) == (backend, False)
    assert (" or more for " in choice.reason) == (backend == "ort")


def test_the_nearest_batch_counts() -> None:
    far = Near({"eager": Rate(0.05, 5.0), "ort": Rate(0.10, 8.0)}, 8.0)
    for near in ([far, Near(EAGER_AND_ORT, 2.0)], [Near(EAGER_AND_ORT, 0.5), far]):
        choice = begin({}, {}, 1000, near)
        assert choice.backend == "ort"
    assert (
        choice.reason
        == "ort 33 s, eager 55 s or more for 1,000 steps, by runs with another batch or data on this machine"
    )
    assert begin({}, {}, 1000, [far]).backend == "eager"


def test_what_cannot_run_is_left_out_with_its_reason() -> None:
    choice = begin({name: ALL[name] for name in ("eager", "compile")}, NO_ORT, 10_000)
    assert (choice.backend, choice.is_final) == ("compile", True)
    assert choice.reason.endswith("; without ort: it needs onnxruntime-training, which is not installed")


def test_an_unfit_model_is_left_out_whatever_its_rate_was() -> None:
    choice = begin({**ALL, "ort": Rate(0.001, 1.0, unfit="backend=ort cannot train this model: Loop")}, {}, 10_000)
    assert choice.backend == "compile"
    assert "without ort: backend=ort cannot train this model: Loop" in choice.reason


def test_where_nothing_else_can_run_eager_is_decided() -> None:
    choice = begin({}, {**NO_ORT, "compile": "no compiler"}, 10)
    assert (choice.backend, choice.is_final) == ("eager", True)


def test_a_run_that_is_too_short_tries_nothing() -> None:
    plan = plan_trials("eager", Rate(0.1, 5.0), spent=6.0, steps=1000, known={}, refused={})
    assert plan.backends == ()
    assert plan.reason == "100 s of training are too short to pay for a trial of another backend"


def test_a_trial_needs_the_time_of_a_start() -> None:
    def tries(steps: int) -> bool:
        return bool(plan_trials("eager", Rate(0.1, 5.0), spent=6.0, steps=steps, known={}, refused={}).backends)

    assert [tries(steps) for steps in (7_400, 7_500)] == [False, True]


def test_a_trial_of_slow_steps_needs_the_time_of_its_steps_too() -> None:
    """At 3 s for a step, the four that follow the start take as long as the start."""

    def plan(steps: int) -> Plan:
        return plan_trials("eager", Rate(3.0, 10.0), spent=34.0, steps=steps, known={}, refused={})

    assert "too short to pay for a trial" in plan(1_000).reason
    assert plan(1_200).backends == ("ort", "compile")
    assert plan(1_200).least_seconds == 16.0


def test_a_long_run_tries_what_is_not_known() -> None:
    plan = plan_trials("eager", Rate(0.1, 5.0), spent=6.0, steps=20_000, known={"compile": ALL["compile"]}, refused={})
    assert (plan.backends, plan.reason) == (("ort",), "")
    assert plan.seconds == pytest.approx(0.5 * SHARE * 2000 - 6)


def test_a_trial_without_a_result_is_made_again_with_twice_its_time() -> None:
    known = {**ALL, "compile": Rate(tried_seconds=20.0)}

    def plan(steps: int) -> tuple[str, ...]:
        return plan_trials("ort", Rate(0.1, 5.0), 6.0, steps, known, {}).backends

    assert plan(30_600) == ()
    assert plan(30_700) == ("compile",)
    assert "compile gave no result" in plan_trials("ort", Rate(0.1, 5.0), 6.0, 30_600, known, {}).reason


def test_what_another_run_has_measured_meanwhile_needs_no_trial() -> None:
    """The run concludes from that: there is nothing to try, and no reason to stay."""
    assert plan_trials("eager", Rate(0.1, 5.0), 6.0, 30_000, ALL, {}) == Plan()
    assert plan_trials("eager", Rate(0.1, 5.0), 6.0, 30_000, {}, {"ort": "a rule", "compile": "a rule"}) == Plan()


def test_trials_end_after_ten_minutes_however_long_the_run_is() -> None:
    assert plan_trials("eager", Rate(1.0, 5.0), 6.0, 10**9, {}, {}).seconds == 600


def test_a_change_must_pay_for_what_is_done_already() -> None:
    known = {"ort": Rate(0.09, 8.0)}
    assert conclude("eager", Rate(0.1, 5.0), 50, 1000, known, {}).backend == "eager"
    changed = conclude("eager", Rate(0.1, 5.0), 50, 2000, known, {})
    assert (changed.backend, changed.is_final) == ("ort", True)
    assert changed.reason.startswith("ort 188 s, eager 195 s for the rest")


def test_rates_of_an_idle_machine_do_not_win_against_steps_under_load() -> None:
    """ORT was slower than eager on the idle machine. Now steps of eager take twice as long, and it still is slower."""
    known = {"eager": Rate(0.10, 5.0), "ort": Rate(0.12, 8.0), "compile": Rate(tried_seconds=9.0)}
    measured = Rate(0.20, 10.0)
    assert conclude("eager", measured, 50, 10_000, known, {}).backend == "ort"
    now = as_now(known, "eager", measured)
    assert now["ort"].step_seconds == pytest.approx(0.24)
    assert now["ort"].start_seconds == pytest.approx(16.0)
    assert now["compile"] == known["compile"]
    assert conclude("eager", measured, 50, 10_000, now, {}).backend == "eager"
    assert as_now(known, "eager", Rate(0.05, 5.0)) == known
    # Without an earlier rate of the current backend, nothing says how the load has changed.
    assert as_now({"ort": ALL["ort"]}, "eager", measured) == {"ort": ALL["ort"]}


def test_a_trial_without_a_result_changes_nothing_and_is_named() -> None:
    choice = conclude("eager", Rate(0.1, 5.0), 50, 1000, {"compile": Rate(tried_seconds=9.0)}, NO_ORT)
    assert choice.backend == "eager"
    assert "; the trial of compile gave no result" in choice.reason


def test_an_unfit_backend_is_not_changed_to() -> None:
    choice = conclude("eager", Rate(0.1, 5.0), 50, 10**6, {"ort": Rate(0.01, 1.0, unfit="a branch is frozen")}, {})
    assert choice.backend == "eager"
    assert choice.reason.endswith("; without ort: a branch is frozen")


@pytest.mark.parametrize("seed", range(5))
def test_drawn_runs_never_cost_more_than_their_share(seed: int) -> None:
    """Of runs whose true rates are drawn: one that knows nothing takes at most 3 % longer than in eager, and one that
    knows them all takes the best."""
    draw = random.Random(seed)
    for _ in range(400):
        steps, step = int(10 ** draw.uniform(1, 6)), 10 ** draw.uniform(-3, 1)
        true = {
            "eager": Rate(step, draw.uniform(2, 30)),
            "compile": Rate(step * draw.uniform(0.5, 2), draw.uniform(3, 120)),
            "ort": Rate(step * draw.uniform(0.5, 2), draw.uniform(3, 60)),
        }
        spent = _time_of_run(true, steps)
        stays = true["eager"].total(steps)
        assert stays is not None
        assert spent <= stays * (1 + SHARE) + 1e-6
        best = min(rate.total(steps) or 0.0 for rate in true.values())
        with_cache = true[begin(true, {}, steps).backend].total(steps)
        assert with_cache is not None
        assert with_cache <= best / (1 - MARGIN) + 1e-9


def _time_of_run(true: dict[str, Rate], steps: int) -> float:
    """The time of a run on a machine that knows nothing, when each backend takes its true times."""
    eager = true["eager"]
    assert eager.start_seconds is not None
    assert eager.step_seconds is not None
    done = min(5, steps)
    clock = eager.start_seconds + done * eager.step_seconds
    plan = plan_trials("eager", eager, clock, steps, {}, {})
    known: dict[str, Rate] = {}
    left = plan.seconds
    for name in plan.backends:
        if left < 0.9 * plan.least_seconds:
            break
        needs = (true[name].start_seconds or 0.0) + 5 * (true[name].step_seconds or 0.0)
        known[name] = true[name] if needs <= left else Rate(tried_seconds=left)
        clock += min(needs, left)
        left -= min(needs, left)
    chosen = conclude("eager", eager, done, steps, known, {}).backend if plan.backends else "eager"
    if chosen == "eager":
        return clock + (steps - done) * eager.step_seconds
    whole = true[chosen].total(steps)
    assert whole is not None
    return clock + whole
