"""Which backend a run with ``backend=auto`` takes: pure functions of rates, steps and seconds.

A run begins with the best backend that is known, else with eager. Its first steps show how long it would take. Where
some backend is not known yet and the run is long enough, the others are tried, and the run begins again with another
one if that makes the rest of it shorter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ortlaunch.base.text import counted

BACKENDS = ("eager", "compile", "ort")
"""All candidates. Of two that are equally fast, the earlier one is taken."""
SHARE = 0.03
"""The largest part of a run's time that trials and a second start may take."""
_FASTEST = 0.5
"""The time of a run whose backend is changed is at least taken to be this part of the time that it began with."""
MARGIN = 0.02
"""A backend is taken in place of an earlier one of `BACKENDS` only if the whole run is shorter by this share."""
_NEAR_MARGIN = 0.1
"""The same where another batch was measured: which backend is faster may change with the batch."""
_MOST_SECONDS = 600.0
"""The longest time for all trials of a run together, so that a compiler that hangs does not hold up a run of days."""
_TRIAL_STEPS = 4
"""The steps of the shortest trial after its first one; see `ortlaunch.trainer.auto.trial`."""
_AGAIN = 2.0
"""A backend whose trial did not end is tried again when there is this many times the time of that trial."""


@dataclass(frozen=True)
class Rate:
    """What is known of one backend for runs of one kind. Without `step_seconds`, it was not measured."""

    step_seconds: float | None = None
    """The median time of a step."""
    start_seconds: float | None = None
    """The time from the start to the end of the first step: imports, export, compilation, checks."""
    unfit: str = ""
    """Why the model does not run on it; empty if it does or if that is not known."""
    tried_seconds: float = 0.0
    """How long a trial took that did not end; 0 if there was none."""

    def total(self, steps: int) -> float | None:
        """The time of a run of `steps` in seconds; None if it is not known."""
        if self.unfit or self.step_seconds is None or self.start_seconds is None:
            return None
        return self.start_seconds + steps * self.step_seconds


@dataclass(frozen=True)
class Near:
    """What runs have measured that differ in the batch or the data alone."""

    rates: Mapping[str, Rate]
    """By backend."""
    times: float
    """How many times as much work a step of this run has, in samples or tokens."""


@dataclass(frozen=True)
class Choice:
    """A backend and why it was taken."""

    backend: str
    reason: str
    is_final: bool
    """Whether no other backend will be tried in this run."""


@dataclass(frozen=True)
class Plan:
    """What to do after the first steps."""

    backends: tuple[str, ...] = ()
    """The backends to try, in this order; empty for none."""
    seconds: float = 0.0
    """The time for all trials together."""
    least_seconds: float = 0.0
    """A trial that has less time cannot end."""
    reason: str = ""
    """Why nothing is tried; empty if something is, or if all backends are known."""


def begin(known: Mapping[str, Rate], refused: Mapping[str, str], steps: int, near: Sequence[Near] = ()) -> Choice:
    """The backend that a run begins with.

    Args:
        known: what earlier runs on this machine have measured, by backend.
        refused: why a backend cannot run at all, by backend: a rule, or a missing package.
        steps: the steps that the run is to make.
        near: what runs with another batch have measured on this machine.
    """
    choice = _begin(known, refused, steps)
    if choice.is_final:
        return choice
    fit, without = _fit(known, refused)
    unknown = [name for name in fit if name != choice.backend and known.get(name, Rate()).total(steps) is None]
    totals = _as_near(choice.backend, unknown, known, steps, near)
    best = min(totals, key=lambda name: totals[name], default=choice.backend)
    if best == choice.backend or totals[best] >= (1 - _NEAR_MARGIN) * totals[choice.backend]:
        return choice
    reason = (
        f"{in_words(totals)} or more for {counted(steps, 'step')}, by runs with another batch or data on this "
        f"machine{without}"
    )
    return Choice(best, reason, is_final=False)


def _begin(known: Mapping[str, Rate], refused: Mapping[str, str], steps: int) -> Choice:
    """The backend to begin with by what this kind of run has measured."""
    fit, without = _fit(known, refused)
    totals = {name: total for name in fit if (total := known.get(name, Rate()).total(steps)) is not None}
    if fit == ("eager",):
        return Choice("eager", f"no other backend can run it{without}", is_final=True)
    if not totals:
        return Choice("eager", f"no backend has been measured for it on this machine{without}", is_final=False)
    best = _shortest(totals)
    if "eager" not in totals and (known[best].start_seconds or 0.0) > totals[best] / 2:
        why = f"{best} would start for longer than it trains, and eager has not been measured on this machine"
        return Choice("eager", why, is_final=False)
    is_final = len(totals) == len(fit)
    measured = f"{in_words(totals)} for {counted(steps, 'step')} by earlier runs on this machine"
    return Choice(best, f"{measured}{without}", is_final=is_final)


def _as_near(
    current: str, unknown: Sequence[str], known: Mapping[str, Rate], steps: int, near: Sequence[Near]
) -> dict[str, float]:
    """The times of a run with `current` and with some of `unknown`, by runs of another batch that have measured both.

    Where `current` is not known either, they are the least to expect: a step with less work takes at least its share of
    the time, and one with more work at least as long.
    """
    here = known.get(current, Rate())
    for one in sorted(near, key=lambda one: abs(math.log(one.times))):
        there = one.rates.get(current, Rate())
        if there.total(steps) is None or not there.step_seconds:
            continue
        times = min(1.0, one.times)
        if here.total(steps) is not None and here.step_seconds:
            times = here.step_seconds / there.step_seconds
        rates = {name: one.rates[name] for name in unknown if name in one.rates} | {current: there}
        # The start does not grow with the work of a step.
        scaled = {name: replace(rate, step_seconds=times * (rate.step_seconds or 0.0)) for name, rate in rates.items()}
        totals = {name: total for name, rate in scaled.items() if (total := rate.total(steps)) is not None}
        if len(totals) > 1:
            return totals
    return {}


def plan_trials(
    current: str,
    measured: Rate,
    spent: float,
    steps: int,
    known: Mapping[str, Rate],
    refused: Mapping[str, str],
) -> Plan:
    """Whether the backends that are not known are worth a trial.

    Args:
        current: the backend of the first steps.
        measured: its rate in them, with the start of this run.
        spent: seconds from the run's start until now, which a change of the backend makes worthless.
        steps: the steps that the run is to make.
        known: as for `begin`.
        refused: as for `begin`.
    """
    assert measured.step_seconds is not None and measured.start_seconds is not None
    fit, _ = _fit(known, refused)
    unknown = [name for name in fit if name != current and known.get(name, Rate()).total(steps) is None]
    if not unknown:
        # Another run has measured them since this one has begun.
        return Plan()
    whole = steps * measured.step_seconds
    # Half as long a run is the least to expect, and a second start has its share in the cost.
    seconds = min(_MOST_SECONDS, SHARE * _FASTEST * whole - spent)
    # A trial is a start of its own, with the first step, and a few steps more. A shorter one cannot end in time.
    least = measured.start_seconds + _TRIAL_STEPS * _FASTEST * measured.step_seconds
    if seconds < least:
        return Plan(reason=f"{_span(whole)} of training are too short to pay for a trial of another backend")
    worth = tuple(name for name in unknown if seconds >= _AGAIN * known.get(name, Rate()).tried_seconds)
    if not worth:
        tried = " and ".join(f"the trial of {name} gave no result" for name in unknown)
        return Plan(reason=f"{tried} in an earlier run, and there is not twice its time now")
    # ORT comes first, because it is the more likely to be the fastest.
    return Plan(tuple(sorted(worth, reverse=True)), seconds, least)


def as_now(known: Mapping[str, Rate], current: str, measured: Rate) -> dict[str, Rate]:
    """What earlier runs have measured, as it would be under the load of this machine now.

    If the current backend takes twice as long for a step as in an earlier run, the others are taken to do so too.
    Otherwise a rate of an idle machine would make any other backend look faster than the current one.

    Args:
        known: as for `begin`.
        current: the backend of the first steps.
        measured: its rate in them.
    """
    earlier = known.get(current, Rate()).step_seconds
    if not earlier or measured.step_seconds is None:
        return dict(known)
    # Never faster: one rate may be of a busy machine and the other of an idle one.
    load = max(1.0, measured.step_seconds / earlier)

    def scaled(seconds: float | None) -> float | None:
        return None if seconds is None else load * seconds

    return {
        name: replace(one, step_seconds=scaled(one.step_seconds), start_seconds=scaled(one.start_seconds))
        for name, one in known.items()
    }


def conclude(
    current: str,
    measured: Rate,
    steps_done: int,
    steps: int,
    known: Mapping[str, Rate],
    refused: Mapping[str, str],
) -> Choice:
    """The backend for the rest of the run, after all trials.

    Args:
        current: the backend of the first steps.
        measured: its rate in them.
        steps_done: the number of these steps.
        steps: the steps that the run is to make.
        known: what is known of the other backends, by backend, with the results of the trials.
        refused: as for `begin`.
    """
    assert measured.step_seconds is not None
    fit, without = _fit(known, refused)
    # What it has started and done counts for the current backend; another one begins again.
    totals = {current: (steps - steps_done) * measured.step_seconds}
    for name in fit:
        total = known.get(name, Rate()).total(steps)
        if name != current and total is not None:
            totals[name] = total
    best = min(totals, key=lambda name: totals[name])
    chosen = best if totals[best] < (1 - MARGIN) * totals[current] else current
    late = [name for name in fit if name != current and name not in totals and name in known]
    unended = "".join(f"; the trial of {name} gave no result" for name in late)
    return Choice(chosen, f"{in_words(totals)} for the rest by trials{unended}{without}", is_final=True)


def in_words(totals: Mapping[str, float]) -> str:
    """The predicted times, the shortest first: ``ort 31 s, eager 52 s``."""
    ordered = sorted(totals, key=lambda name: (totals[name], BACKENDS.index(name)))
    return ", ".join(f"{name} {_span(totals[name])}" for name in ordered)


def _fit(known: Mapping[str, Rate], refused: Mapping[str, str]) -> tuple[tuple[str, ...], str]:
    """The backends that can run, and the others with their reasons as the end of a sentence."""
    # Eager is there for whatever the others cannot do, and if it fails too, the error is the run's own.
    reasons = {name: refused.get(name) or known.get(name, Rate()).unfit for name in BACKENDS if name != "eager"}
    fit = tuple(name for name in BACKENDS if not reasons.get(name))
    return fit, "".join(f"; without {name}: {reason}" for name, reason in reasons.items() if reason)


def _shortest(totals: Mapping[str, float]) -> str:
    best = min(totals.values())
    return next(name for name in BACKENDS if name in totals and totals[name] * (1 - MARGIN) <= best)


def _span(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
