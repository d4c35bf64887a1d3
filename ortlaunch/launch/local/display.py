"""Shows a run while it goes on: a progress bar on a terminal, one line per log step elsewhere."""

from __future__ import annotations

import math
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from ortlaunch.base.text import counted
from ortlaunch.config.devices import resolve_device
from ortlaunch.launch.plan import NodePart
from ortlaunch.run.events import Event, Measured
from ortlaunch.run.goodput import Goodput
from ortlaunch.run.state import RunState

_GOOD_PERCENT = 90.0
_SHORT_SECONDS = 600.0
"""In shorter runs start-up takes most of the time, so their goodput is not printed."""
_LOOK_SECONDS = 1.0
_SPEED_SECONDS = 600.0
"""Period over which the time left is estimated. rich's default of 30 seconds may pass without a step."""

_OF_STEP, _OF_EVALUATION = ("loss", "lr", "grad_norm", "loss_scale"), ("loss", "seconds")
"""Values that each step, or evaluation, has; of these the loss alone is shown."""


class Display:
    """Shows the events of a journal; prints what rank 0 prints above the bar."""

    def __init__(self, part: NodePart, console: Console | None = None) -> None:
        steps = part.plan.work.steps
        self._console = console or Console(highlight=False)
        self._plan = part.plan
        self._threads = part.threads
        self._steps = steps
        self._of = f"/{steps}" if steps else ""
        self._device = resolve_device(part.plan.config.device).value
        self._state = RunState()
        self._looked = 0.0
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    @property
    def latest(self) -> dict[str, float]:
        """The last value seen of each metric."""
        return self._state.figures

    @property
    def trains(self) -> bool:
        """Whether this attempt has made its first step."""
        return self._state.trains

    def start(self) -> None:
        """Prints what starts and, on a terminal, opens the progress bar."""
        plan = self._plan
        workers = f"{counted(plan.workers, 'worker')} x {counted(self._threads, 'thread')}"
        machines = f"{plan.nodes} machines x " if plan.nodes > 1 else ""
        self._print(f"ortlaunch: {plan.name} on {self._device}, {machines}{workers}")
        self._print(f"run folder: {plan.run_dir}")
        # Without a number of steps there is nothing to fill a bar with.
        if self._console.is_terminal and self._steps:
            self._progress = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}  {task.description}"),
                # The bar takes the width that the figures and the time left do not use: little on 80 columns.
                BarColumn(bar_width=None, table_column=Column(ratio=1)),
                TimeRemainingColumn(),
                console=self._console,
                speed_estimate_period=_SPEED_SECONDS,
                # At rich's ten times a second the bar takes 1 % of a core that the workers need.
                refresh_per_second=1.0 / _LOOK_SECONDS,
                expand=True,
            )
            self._task = self._progress.add_task("starting", total=self._steps)
            self._progress.start()

    def event(self, event: Event) -> None:
        """Shows one event of the journal."""
        self._state.take(event)
        if not isinstance(event, Measured):
            return
        step, values = event.step, event.values
        if "eval/loss" in values:
            self._print(f"step {step}{self._of}  {describe_evaluation(values)}")
        if not event.is_log_step:
            return
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step, description=describe_step(values))
        else:
            self._print(f"step {step}{self._of}  {describe_step(values)}")

    def look(self) -> None:
        """Moves the bar between two log steps, by the step in the first worker's heartbeat file."""
        now = time.monotonic()
        # Before the first step the heartbeat file may still be that of an earlier attempt.
        if self._progress is None or self._task is None or not self.trains or now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        step = self._plan.files.beat().get("step")
        # The file is written every other second, so the journal may be newer.
        if isinstance(step, int) and step > (self._state.step or 0):
            self._progress.update(self._task, completed=step)

    def line(self, text: str) -> None:
        """Prints a line of rank 0's output unchanged."""
        self._print(text)

    def stop(self) -> None:
        """Closes the progress bar."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def summary(
        self, ending: str, seconds: float, record: list[tuple[str, str]], account: Goodput | None = None
    ) -> None:
        """Prints how the run ended, its figures, and where everything is.

        Args:
            ending: finished, failed, killed, or stopped (on request, with a checkpoint or before the first step).
            seconds: wall time of the run.
            record: label and place of each thing that the run left.
            account: where its wall time went.
        """
        self._print(f"{ending} after {seconds:.1f} s{describe_summary(self.latest)}")
        if account is not None and (text := describe_account(account)):
            self._print(text)
        for label, place in record:
            self._print(f"{label + ':':<11} {place}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def describe_step(values: dict[str, float]) -> str:
    """Returns the text for one log step."""
    parts = [f"loss {values['train/loss']:.4f}", *_further(values, "train/", _OF_STEP)]
    speed = values.get("throughput/tokens_per_second")
    if speed is not None:
        parts.append(f"{speed:,.0f} tokens/s")
    elif (samples := values.get("throughput/samples_per_second")) is not None:
        parts.append(f"{samples:,.1f} samples/s")
    if (seconds := values.get("throughput/step_seconds")) is not None:
        parts.append(f"{seconds:.3f} s/step")
    memory = values.get("memory/peak_allocated_gib", values.get("memory/rss_gib"))
    if memory is not None:
        parts.append(f"{memory:.2f} GiB")
    return "  ".join(parts)


def describe_evaluation(values: dict[str, float]) -> str:
    """Returns the text for an evaluation."""
    return "  ".join([f"eval loss {values['eval/loss']:.4f}", *_further(values, "eval/", _OF_EVALUATION)])


def _further(values: dict[str, float], prefix: str, known: tuple[str, ...]) -> list[str]:
    """The user's own values and metrics."""
    names = [name.removeprefix(prefix) for name in values if name.startswith(prefix)]
    return [f"{name} {values[prefix + name]:.4g}" for name in names if name not in known]


def describe_account(account: Goodput) -> str:
    """Returns the text on what kept a run from training; empty if the run is short or has lost little."""
    if account.percent >= _GOOD_PERCENT or (account.wall < _SHORT_SECONDS and not account.lost + account.down):
        return ""
    parts = ("startup", "evaluation", "checkpoint", "lost", "down", "other")
    seconds = sorted(((getattr(account, part), part) for part in parts), reverse=True)
    names = {"lost": "steps taken again", "checkpoint": "checkpoints", "startup": "start-up"}
    shown = ", ".join(f"{names.get(part, part)} {value:,.0f} s" for value, part in seconds[:3] if value >= 0.5)
    return f"goodput:    {account.percent:.0f} % of {account.wall:,.0f} s went into steps that count ({shown})"


def describe_summary(latest: dict[str, float]) -> str:
    """Returns the text with the figures of a run's steady part; empty if there is none."""
    parts = []
    if "train/loss" in latest:
        parts.append(f"last loss {latest['train/loss']:.4f}")
    for name, unit in (("tokens", "tokens/s"), ("samples", "samples/s")):
        median = latest.get(f"summary/{name}_per_second_median")
        if median is not None and not math.isnan(median):
            parts.append(f"{median:,.1f} {unit} (median)")
            break
    if "summary/step_seconds_p50" in latest:
        parts.append(f"step {latest['summary/step_seconds_p50']:.3f} s (median)")
    if "summary/peak_memory_gib" in latest:
        parts.append(f"peak memory {latest['summary/peak_memory_gib']:.2f} GiB per worker")
    return ": " + ", ".join(parts) if parts else ""
