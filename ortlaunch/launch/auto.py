"""``backend=auto``: which of eager, compile and ort a run takes, decided before its workers start.

The best backend by the rates of earlier runs of this kind is taken. Where one of them has no rate, each makes a trial,
if the run is long enough to pay for that. On a cluster the first node of the run's job decides, for all of its nodes.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ortlaunch.base.reading import read_json
from ortlaunch.base.text import counted, say
from ortlaunch.config import candidates
from ortlaunch.config.precisions import BACKENDS
from ortlaunch.config.schema import AnyRun, AutoConfig, BackendConfig, Config, LocalConfig, NoTrackingConfig
from ortlaunch.launch.kind import kind_of
from ortlaunch.launch.launcher import QueueLauncher
from ortlaunch.launch.plan import LaunchPlan
from ortlaunch.launch.table import launcher_of
from ortlaunch.launch.trial import Limits, Outcome, ended_by_signals, short, tried
from ortlaunch.run import rates
from ortlaunch.run.rates import Rate
from ortlaunch.run.run import Run
from ortlaunch.run.state import FIRST_STEP

_LEAST_STEPS = 500
"""A run of fewer steps makes no trial while nothing is known of its speed."""
_PAYS = 1.0
"""Trials are made while the run takes this many times as long as they do: later runs of the kind gain by them, too."""
_MARGIN = 0.02
"""A backend is taken in place of an earlier one of `BACKENDS` only if the whole run is shorter by this share."""
_SECONDS, _STEPS = 2.0, 100
"""A trial ends after so many steps, or once it has measured clearly more seconds than that."""
_FIRST_SECONDS, _LEAST_SECONDS, _SHARE = 600.0, 60.0, 1 / 6
"""The longest time of the first trial, and the shortest limit of a later one: this share of the run's time."""
_IDLE = 0.1
"""With less than this share of the cores in other hands, a rate counts as that of an idle machine."""
_LEAST_STEADY = 5
"""Steady steps that a run's own rate needs."""
_ENDS = {
    "out of memory": "ran out of memory",
    "time-out": "did not end in time",
    "refused": "was refused",
    "failed": "failed",
}


def chosen(config: AnyRun) -> tuple[AnyRun, str]:
    """The configuration of a run that starts from here, with its backend named, and why it is that one.

    Args:
        config: the configuration, which has passed all checks.

    Returns:
        The configuration, and the reason in one line, which is empty where the configuration named a backend. A run
        that waits in a queue keeps ``backend=auto``: its job decides.
    """
    if not (isinstance(config, Config) and isinstance(config.backend, AutoConfig)):
        return config, ""
    launcher = launcher_of(config)
    if isinstance(launcher, QueueLauncher):
        return config, "backend=auto is decided on the job's first node, before the workers start"
    if not launcher.keeps_record(config):
        return config, "backend=auto is decided on the run's first machine"
    with ended_by_signals():
        backend, why = decided(config)
        return dataclasses.replace(config, backend=backend), why


def recorded(config: AnyRun, run: Run) -> AnyRun:
    """The configuration of a run with the backend that an earlier version of ortlaunch has recorded beside it."""
    name = (read_json(run.backend_file) or {}).get("backend")
    if name in BACKENDS and isinstance(config, Config) and isinstance(config.backend, AutoConfig):
        return dataclasses.replace(config, backend=candidates.plain_backend(name))
    return config


def with_backend(config: Config, name: str) -> Config:
    """The configuration with a backend and its default keys."""
    return dataclasses.replace(config, backend=candidates.plain_backend(name))


def decided(config: Config) -> tuple[BackendConfig, str]:
    """Decides here, where the workers will run, or their first ones; returns the backend, and why it is that one."""
    kind, steps = kind_of(config), config.train.steps
    known, refused = rates.read(kind), candidates.refused(config)
    left_out = refused | {name: rate.unfit for name, rate in known.items() if rate.unfit and name not in refused}
    names = [name for name in BACKENDS if name not in left_out]
    rated = {name: known[name] for name in names if name in known}
    backend = best(rated, steps) or names[0]
    if len(names) == 1:
        why = "no other backend can run it"
    elif len(rated) == len(names):
        why = f"{in_words(rated, steps)}, by earlier runs of this kind"
    elif reason := why_no_trials(rated, len(names), steps):
        why = reason
    elif config.launcher.dry_run:
        return candidates.plain_backend(backend), f"backend=auto would try {_listed(names)} before the workers start"
    else:
        backend, why, unfit = _by_trials(config, names, kind)
        left_out |= unfit
    without = "".join(f"; without {name}: {reason}" for name, reason in left_out.items())
    return candidates.plain_backend(backend), f"backend=auto takes {backend}: {why}{without}"


def _by_trials(config: Config, names: Sequence[str], kind: Mapping[str, object]) -> tuple[str, str, dict[str, str]]:
    """The backend that trials show to be the best, how long each would take, and why others are left out."""
    say(f"backend=auto tries {_listed(names)} for this kind of run", file=sys.stderr)
    batch = config.train.batch_size * config.train.grad_accumulation * launcher_of(config).workers_per_node(config)
    begun, steps, others = time.monotonic(), config.train.steps, 0.0

    def trial(name: str, seconds: float) -> Outcome:
        nonlocal others
        outcome = _trial(config, name, seconds)
        others = max(others, outcome.others)
        if outcome.ok or (name != names[0] and not outcome.is_of_machine):
            rates.note(kind, name, rate_of(outcome, batch), is_sure=outcome.others < _IDLE)
        return outcome

    found = tried_each(names, steps, batch, trial)
    spent = f"trials that took {time.monotonic() - begun:.0f} s"
    unfit = {name: rate.unfit for name, rate in found.items() if rate.unfit}
    rated = {name: rate for name, rate in found.items() if not rate.unfit}
    backend = best(rated, steps)
    if backend is None:
        return names[0], unfit.pop(names[0]), unfit
    untried = [name for name in names if name not in found]
    short_of = f"; the run is too short to pay for trials of {_listed(untried)}" if untried else ""
    busy = f"; other processes had {others:.0%} of the cores, so this may be wrong" if others >= _IDLE else ""
    return backend, f"{in_words(rated, steps)}, by {spent}{short_of}{busy}", unfit


def tried_each(names: Sequence[str], steps: int, batch: int, trial: Callable[[str, float], Outcome]) -> dict[str, Rate]:
    """Tries one backend after the other, while the run pays for it.

    Args:
        names: the backends; the first is the one that every model runs on.
        steps: the steps of the run.
        batch: samples of a step in a trial.
        trial: makes the trial of a backend, with the seconds that it may take.

    Returns:
        What was found of each that was tried.
    """
    found: dict[str, Rate] = {}
    longest, spent = _FIRST_SECONDS, 0.0
    for left, name in zip(range(len(names), 0, -1), names, strict=True):
        if rated := [rate for rate in found.values() if not rate.unfit]:
            whole = min(rate.total(steps) for rate in rated)
            if whole < _PAYS * left * spent:
                break
            longest = min(_FIRST_SECONDS, max(_LEAST_SECONDS, _SHARE * whole))
        outcome = trial(name, longest)
        spent = outcome.seconds
        found[name] = rate_of(outcome, batch)
        if outcome.status in ("refused", "failed") and name == names[0]:
            # The model, the data or the machine is at fault. The run says so itself.
            break
    return found


def why_no_trials(rated: Mapping[str, Rate], count: int, steps: int) -> str:
    """Why a run makes no trials though it does not know all backends; empty if it makes them.

    Args:
        rated: the rates of the backends that are known.
        count: the backends that would be tried.
        steps: the steps of the run.
    """
    if not rated:
        few = f"{counted(steps, 'step')} are too few to pay for trials"
        return few if steps < _LEAST_STEPS else ""
    rate = min(rated.values(), key=lambda rate: rate.total(steps))
    pays = rate.total(steps) >= _PAYS * count * (rate.start_seconds + _SECONDS)
    return "" if pays else f"{in_words(rated, steps)}, which is too short to pay for trials of other backends"


def best(rated: Mapping[str, Rate], steps: int) -> str | None:
    """The backend by which the run is over first; of those that are about equal, the first of `BACKENDS`."""
    totals = {name: rated[name].total(steps) for name in BACKENDS if name in rated}
    return next((name for name in totals if totals[name] * (1 - _MARGIN) <= min(totals.values())), None)


def in_words(rated: Mapping[str, Rate], steps: int) -> str:
    """The predicted times, the shortest first: ``ort 31 s, eager 52 s for 2000 steps``."""
    totals = sorted((rate.total(steps), name) for name, rate in rated.items())
    return f"{', '.join(f'{name} {_span(total)}' for total, name in totals)} for {counted(steps, 'step')}"


def rate_of(outcome: Outcome, batch: int) -> Rate:
    """What a trial says of its backend.

    Args:
        outcome: what it found.
        batch: samples of a step.
    """
    if not outcome.ok:
        return Rate(unfit=f"its trial {_ENDS[outcome.status]}: {outcome.reason}")
    step = batch / outcome.rate
    # The first of the steps that the start leaves out is in the time to the first step, too.
    return Rate(step, max(outcome.first_step, outcome.start))


def keep_rate(plan: LaunchPlan) -> None:
    """Keeps the rate of a run that has finished, for later ones of its kind.

    Runs of scripts are left out, and those whose backend has other than its default keys, that were profiled, or in
    which ONNX Runtime was not active.

    Args:
        plan: the run, with all figures in its journal.
    """
    config = plan.config
    if not isinstance(config, Config):
        return
    state = plan.files.state()
    step, first = (state.figures.get(name) for name in ("summary/step_seconds_p50", FIRST_STEP))
    if not step or first is None or state.figures.get("summary/steady_steps", 0.0) < _LEAST_STEADY:
        return
    is_off = config.backend.name == "ort" and state.tags.get("ortlaunch.ort_active") != "true"
    if is_off or config.profile is not None or not candidates.is_plain(config.backend):
        return
    # Of a second of training nobody knows what other processes took meanwhile.
    others = state.figures.get("summary/other_cpu_percent", 100.0)
    rates.note(kind_of(config), config.backend.name, Rate(step, first), is_sure=others < 100 * _IDLE)


def _trial(config: Config, name: str, seconds: float) -> Outcome:
    """Tries a backend with the workers of this machine; nothing is left of it but caches."""
    launcher = config.launcher
    local = LocalConfig(
        workers_per_node=launcher_of(config).workers_per_node(config),
        threads=launcher.threads,
        allocator=launcher.allocator,
        timeout_seconds=launcher.timeout_seconds,
    )
    with tempfile.TemporaryDirectory(prefix="ortlaunch-trial-", ignore_cleanup_errors=True) as folder:
        alone = dataclasses.replace(
            with_backend(config, name), launcher=local, run_root=folder, tracking=NoTrackingConfig(), trackers={}
        )
        return tried(short(alone, _STEPS, log_every=1), Limits(seconds), Path(folder) / "trial", seconds=_SECONDS)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _span(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
