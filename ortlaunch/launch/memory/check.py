"""The memory check of a run, `train.memory_check`: before anything starts, or while it starts.

An estimate that was made before is answered at once. Otherwise the run starts, and a process at low priority
estimates it meanwhile; with ``error`` the command waits for that process. Runs that are far from the limit are not
asked about.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ortlaunch.base.errors import RequestError
from ortlaunch.base.free_memory import available
from ortlaunch.base.text import counted, say
from ortlaunch.config.devices import gpu_memory, resolve_device
from ortlaunch.config.schema import Config, Device, MemoryCheck
from ortlaunch.launch.memory import cache
from ortlaunch.launch.memory.band import Band, size
from ortlaunch.launch.memory.cache import Estimate
from ortlaunch.launch.memory.calibration import Calibration, learn
from ortlaunch.launch.memory.limit import HERE, ON_GPU, limit_of
from ortlaunch.launch.memory.plain import bound
from ortlaunch.launch.memory.question import Question
from ortlaunch.launch.memory.request import Request, variables_of
from ortlaunch.launch.plan import LaunchPlan
from ortlaunch.launch.report_process import ReportProcess, report_of

OFF = "train.memory_check=off"
_PLAINLY = 0.5
"""A run whose bound is below this share of the limit fits without an estimate."""
_MOST_LINES = 3
_GIB = 2**30


class Watch:
    """The check of a run that is starting. The launcher calls `look` again and again."""

    def __init__(
        self, question: Question | None = None, process: ReportProcess | None = None, warning: str = ""
    ) -> None:
        """
        Args:
            question: what is asked; None for nothing.
            process: estimates it; None if nothing is open.
            warning: what is to be told first.
        """
        self._question = question
        self._process = process
        self._warning = warning

    def look(self) -> list[str]:
        """The warning, if the estimate has just ended and the run does not fit. It never waits and never raises."""
        if self._warning:
            line, self._warning = self._warning, ""
            return [f"ortlaunch: warning: {line}"]
        if self._process is None or self._question is None or self._process.poll() is None:
            return []
        process, self._process = self._process, None
        try:
            estimate = estimate_of(process.report())
        except (RequestError, KeyError, TypeError, ValueError):
            return []
        finally:
            process.close()
        line = _judged(self._question, estimate)[0]
        return [f"ortlaunch: warning: {line}"] if line else []

    def learn(self, peak_gib: float | None) -> None:
        """Notes the peak of the run's workers for later estimates, if an estimate is of all that it has done.

        Args:
            peak_gib: the largest peak of a worker in GiB before the end of the run; None if none was measured.
        """
        if self._question is None or not peak_gib or _does_more(self._question.config):
            return
        if self._question.on_gpu:
            return  # The peak is of what torch has allocated, and the estimate of all that CUDA holds.
        estimate = cache.load(self._question.key)
        if estimate is not None:
            question, measured = self._question, int(peak_gib * _GIB)
            learn(question.config, question.key, estimate.worker, measured, is_probed=estimate.is_probed)

    def close(self) -> None:
        """Ends the estimating process, if it is still there."""
        if self._process is not None:
            self._process.close()
            self._process = None


@contextmanager
def watched(plan: LaunchPlan, config: Config) -> Iterator[Watch]:
    """Checks a run before it starts on this machine, and within the block while it starts.

    Args:
        plan: the plan.
        config: the configuration, which has passed all checks.

    Raises:
        RequestError: with ``error``, the run does not fit.
    """
    question = _asked(plan, config)
    is_known, line = _checked(question)
    if line:
        say(f"ortlaunch: warning: {line}", file=sys.stderr)
    watch = Watch(question, None if is_known else _started(question))
    try:
        yield watch
    finally:
        watch.close()


@contextmanager
def watched_in_job(config: Config, workers: int) -> Iterator[Watch]:
    """Checks a run within its job, on the job's first node, which may have less memory than the command has seen.

    Args:
        config: the run's configuration.
        workers: workers on the node.
    """
    question = _question(config, workers, *_in_job(config))
    estimate = None if question is None else cache.load(question.key)
    is_known = question is None or estimate is not None
    line = _judged(question, estimate)[0] if question is not None and estimate is not None else ""
    watch = Watch(question, None if is_known else _started(question), line)
    try:
        yield watch
    finally:
        watch.close()


def before_queue(runs: Sequence[tuple[LaunchPlan, Config]]) -> None:
    """Checks runs before they are queued; of many that do not fit it names the first ones.

    Raises:
        RequestError: with ``error``, one of them does not fit.
    """
    found = [(plan.name, _checked(_asked(plan, config))[1]) for plan, config in runs]
    lines = [f"{name}: {line}" if len(runs) > 1 else line for name, line in found if line]
    for line in lines[:_MOST_LINES]:
        say(f"ortlaunch: warning: {line}", file=sys.stderr)
    if len(lines) > _MOST_LINES:
        say(f"ortlaunch: warning: and {len(lines) - _MOST_LINES} more of these runs", file=sys.stderr)


def say_known(plan: LaunchPlan, config: Config) -> None:
    """Prints the warning of an estimate that was made before, after a dry run."""
    question = _asked(plan, config)
    estimate = None if question is None else cache.load(question.key)
    if question is not None and estimate is not None and (line := _judged(question, estimate)[0]):
        say(f"ortlaunch: warning: {line}", file=sys.stderr)


def estimate_of(report: dict[str, Any]) -> Estimate:
    """The estimate in a report of the tracing process.

    Raises:
        KeyError, TypeError, ValueError: it has none.
    """
    return cache.from_json(report["uncalibrated"])


def _asked(plan: LaunchPlan, config: Config) -> Question | None:
    # To ask for a GPU's memory takes a moment.
    is_off = config.train.memory_check is MemoryCheck.off
    return None if is_off else _question(config, plan.workers, *limit_of(config))


def _in_job(config: Config) -> tuple[int | None, str]:
    """The limit on a node of the run's job."""
    if resolve_device(config.device) is Device.cuda:
        return gpu_memory(), ON_GPU
    limit, source = limit_of(config)
    here = available()
    if limit is None or here < limit:
        # SLURM need not reserve what a job asks for, and other work may be on the node.
        limit, source = here, HERE
    return limit, source


def _question(config: Config, workers: int, limit: int | None, source: str) -> Question | None:
    """What is to be asked about a run; None for nothing, or if it cannot be known."""
    if limit is None or config.train.memory_check is MemoryCheck.off:
        return None
    on_gpu = resolve_device(config.device) is Device.cuda
    return Question(config, workers, config.launcher.nodes, limit, source, on_gpu)


def _checked(question: Question | None) -> tuple[bool, str]:
    """Whether nothing is left to find out, and the warning; with ``error`` the estimate is waited for.

    Raises:
        RequestError: with ``error``, the run does not fit.
    """
    if question is None:
        return True, ""
    is_strict = question.config.train.memory_check is MemoryCheck.error
    estimate = cache.load(question.key)
    if estimate is None:
        if not is_strict or _is_plain(question):
            return False, ""
        try:
            estimate = _waited_for(question)
        except (RequestError, KeyError, TypeError, ValueError) as error:
            return True, f"train.memory_check=error: the memory of the run is not known: {error}"
    line, is_certain = _judged(question, estimate)
    if line and is_certain and is_strict:
        raise RequestError(line)
    return True, line


def _waited_for(question: Question) -> Estimate:
    """Estimates a run now.

    Raises:
        RequestError: it cannot be estimated.
        KeyError, TypeError, ValueError: the report is damaged.
    """
    config, request = question.config, replace(_request(question), may_probe=True)
    report = report_of(
        "estimate",
        config,
        variables_of(config),
        status="estimating the memory ...",
        quiet=False,
        add_files=request.write,
    )
    return estimate_of(report)


def _judged(question: Question, estimate: Estimate) -> tuple[str, bool]:
    """The warning about a run, and whether more is needed than there is; an empty text for a run that fits."""
    calibration = Calibration.of(question.config, is_probed=estimate.is_probed)
    correct = calibration.near(estimate.worker).apply
    band, limit = correct(estimate.machine), question.limit
    if band.high <= limit:
        return "", False
    is_certain = band.middle > limit
    word = "does not fit" if band.low > limit else "most likely does not fit" if is_certain else "may not fit"
    lack = band.middle - limit if is_certain else band.high - limit
    change = next((one.words for one in estimate.changes if correct(one.machine).high <= limit), "")
    who = "a worker" if question.on_gpu else f"{counted(question.workers, 'worker')} on a machine"
    take = "takes" if question.on_gpu or question.workers == 1 else "take"
    return (
        f"the run {word} into memory: {who} {take} {_figures(band)}, and {size(limit)} are there "
        f"({question.limit_source}), {size(lack)} too little{'' if is_certain else ' at worst'}. "
        f"{f'{change} fits' if change else 'ortlaunch estimate looks for a change that fits'}; {OFF} does not check"
    ), is_certain


def _figures(band: Band) -> str:
    return f"{size(band.middle)} ({size(band.low)} to {size(band.high)})"


def _does_more(config: Config) -> bool:
    """Whether a run does what its estimate leaves out: reads initial weights or a checkpoint, or records a profile."""
    is_resumed = config.train.resume not in ("auto", "never")
    return is_resumed or config.model.weights is not None or config.profile is not None


def _is_plain(question: Question) -> bool:
    most = bound(question.config, question.sharing)
    return most is not None and most < _PLAINLY * question.limit


def _request(question: Question) -> Request:
    return Request(
        question.workers,
        question.nodes,
        question.limit,
        question.limit_source,
        quick=False,
        key=question.key,
        on_gpu=question.on_gpu,
        change_only=True,
        may_probe=False,
    )


def _started(question: Question | None) -> ReportProcess | None:
    """Starts to estimate a run in the background; None if there is nothing to start."""
    # A model of Hugging Face would be read into memory with its weights once more.
    if question is None or question.config.model.name == "hf" or _is_plain(question):
        return None
    config, write = question.config, _request(question).write
    try:
        return ReportProcess("estimate", config, variables_of(config), add_files=write, is_background=True)
    except OSError:
        return None
