"""Turns the loop's steps into journal events; the host waits for the device only at log steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ortlaunch.base.errors import RequestError, TrainingError
from ortlaunch.config.schema import TrainConfig
from ortlaunch.data.batch import Batch, tokens
from ortlaunch.metrics.at_log_steps import worker_metrics
from ortlaunch.metrics.memory import peak_memory_gib
from ortlaunch.metrics.stragglers import OwnTime, Tally, straggler_metrics
from ortlaunch.metrics.throughput import Steady, StepClock, Window, window_metrics
from ortlaunch.run.journal import Journal
from ortlaunch.trainer.engine import Engine
from ortlaunch.trainer.figures import Figures
from ortlaunch.trainer.mean import Mean
from ortlaunch.trainer.system_info import SystemInfo
from ortlaunch.trainer.workers import Workers, values_of_all

_BUSY_PERCENT = 10.0
"""Share of a machine's cores used by other processes from which on a run warns of it."""

_LEAST_LOSS_SCALE = 2.0**-14
"""The smallest normal fp16 number. If the gradients overflow at a smaller loss scale, no scale keeps them finite."""


@dataclass(frozen=True)
class WindowFigures(Figures):
    """One worker's figures of a window between two log steps."""

    loss: torch.Tensor
    bad_loss_step: torch.Tensor
    """First step at which this worker's loss was not finite; 0 for none."""
    bad_gradient_step: torch.Tensor
    """First step at which the gradients of all workers were not finite; 0 for none."""
    ort_active: torch.Tensor
    """1 if ONNX Runtime ran the last step of this worker, else 0."""
    own_seconds: torch.Tensor
    """Of a step, before the worker waits for others; the mean over the window."""
    step_seconds: torch.Tensor
    """Of a step; the mean over the window."""
    system: torch.Tensor
    """What `Sampler.window` returned."""
    measured: torch.Tensor
    """The values of `worker_metrics`, in their order."""
    own: torch.Tensor
    """The values that the user's step has returned, in the order of their names; NaN for one that it has not."""


@dataclass(frozen=True)
class SummaryFigures(Figures):
    """One worker's figures of the whole run."""

    peak_memory_gib: torch.Tensor
    other_seconds: torch.Tensor
    """Processor seconds of other processes on this machine in steady windows; 0 where another worker measures it."""
    total_seconds: torch.Tensor
    """Processor seconds that the machine had in them; 0 where another worker measures it."""
    throttled: torch.Tensor
    """1 if the GPU's clocks were held down at some sample, 0 if not, -1 if that is unknown."""


class Recorder:
    """Counts steps on every worker; the first worker journals what all of them saw."""

    def __init__(
        self,
        cfg: TrainConfig,
        workers: Workers,
        journal: Journal | None,
        system: SystemInfo,
        *,
        is_ort_active: Callable[[], bool],
        flops_per_sample: float | None,
        peak_flops: float | None,
        start_step: int = 0,
        tokens_seen: int = 0,
        has_values: bool = False,
    ) -> None:
        """
        Args:
            cfg: when to log.
            workers: this worker's place.
            journal: the run's journal on the first worker, None on the others.
            system: the machines, and the sampler of this worker's own.
            is_ort_active: whether ONNX Runtime really runs this worker's model.
            flops_per_sample: operations of forward and backward for one sample; None where unknown.
            peak_flops: the device's peak in operations per second; None where unknown.
            start_step: steps that earlier attempts have done.
            tokens_seen: tokens that all workers have seen in them.
            has_values: whether steps may return named values.
        """
        self.tokens_seen = tokens_seen
        self.own_time = OwnTime(workers.device)
        """Time in which this worker does not wait for others; the loop marks its parts."""
        self._start_step = start_step
        self._has_values = has_values
        self._names: list[str] | None = None
        self._cfg = cfg
        self._workers = workers
        self._journal = journal
        self._system = system
        self._is_ort_active = is_ort_active
        self._flops_per_sample = flops_per_sample
        self._peak_flops = peak_flops
        self._clock = StepClock(workers.device)
        self._window = Window()
        self._steady = Steady()
        self._stragglers = Tally()
        self._window_disturbed = False
        self._ort_active: bool | None = None
        self._worst_ort_active = True

    def restart_clock(self) -> None:
        """The next step begins now: the time since the last one belongs to no step."""
        self._clock.restart()

    def waited_for_data(self, seconds: float) -> None:
        """Counts time in which the loop had no batch."""
        self._window.data_wait_seconds += seconds

    def micro_batch(self, batch: Batch, samples: int) -> None:
        """Counts the samples and tokens of a micro-batch of which so many samples count."""
        self._window.samples += samples
        number = tokens(batch) if samples else 0
        self._window.tokens += number
        self.tokens_seen += number * self._workers.world_size

    def step_done(self) -> None:
        """Marks the end of an optimizer step."""
        self._clock.step_done()
        self._window.steps += 1

    def disturbed(self) -> None:
        """Leaves the current window out of the run's summary, because profiling made its last step slower."""
        self._window_disturbed = True
        self._clock.restart()

    def is_log_step(self, step: int) -> bool:
        """Whether `step` (counted from 1) ends a window: the first, the last, where the steady part begins, and every
        ``train.log_every`` steps."""
        every = self._cfg.log_every
        assert isinstance(every, int)
        return step in (1, self._cfg.steady_after, self._cfg.steps) or step % every == 0

    def log(
        self, step: int, mean: Mean, grad_norm: torch.Tensor | float | None, lr: float, engine: Engine
    ) -> dict[str, float]:
        """Ends a window: one collective for the figures of all workers, which the first worker journals.

        Returns:
            The figures by name, the same on all workers.

        Raises:
            TrainingError: a loss or gradient was not finite on some worker, at this step or since the last log step.
        """
        steady = self._is_steady(step)
        measured = worker_metrics(self._workers.device)
        mine, step_seconds = self._own_figures(step, mean, engine, measured, steady=steady)
        everyone = WindowFigures.gathered(self._workers, **mine)
        _check_finite(everyone.bad_loss_step.tolist(), everyone.bad_gradient_step.tolist())
        self._note_ort(bool(everyone.ort_active.min() > 0))
        stragglers = straggler_metrics(everyone.own_seconds.tolist(), everyone.step_seconds.tolist())
        metrics = _training_metrics(step, everyone, grad_norm, lr, engine.loss_scale)
        metrics |= self._named(everyone.own)
        metrics |= self._throughput(step_seconds)
        metrics |= dict(zip(measured, everyone.measured.amax(dim=0).tolist(), strict=True))
        metrics["throughput/steady"] = float(steady)
        metrics |= stragglers
        metrics |= self._machine_metrics(everyone, list(measured))
        if steady:
            self._steady.add(self._window, step_seconds)
            self._stragglers.add(stragglers)
        self._window, self._window_disturbed = Window(), False
        if self._journal is not None:
            self._journal.metrics(step, metrics)
        # The journal's own time belongs to no step.
        self._clock.restart()
        return metrics

    def _is_steady(self, step: int) -> bool:
        """Whether the window that `step` ends counts for the run's summary.

        Steady windows begin after the first steps of this attempt, which include export and compilation.
        """
        steps_before = step - self._window.steps
        return not self._window_disturbed and steps_before >= self._start_step + self._cfg.steady_after

    def _throughput(self, step_seconds: list[float]) -> dict[str, float]:
        return window_metrics(
            self._window,
            step_seconds,
            world_size=self._workers.world_size,
            flops_per_sample=self._flops_per_sample,
            peak_flops=self._peak_flops,
        )

    def _machine_metrics(self, everyone: WindowFigures, measured: list[str]) -> dict[str, float]:
        """The figures of each machine and GPU. `measured` has the names of the columns of `WindowFigures.measured`."""
        resident = everyone.measured[:, measured.index("memory/rss_gib")]
        return self._system.nodes.metrics(everyone.system.tolist(), resident.tolist())

    def _own_figures(
        self, step: int, mean: Mean, engine: Engine, measured: dict[str, float], *, steady: bool
    ) -> tuple[dict[str, float | list[float]], list[float]]:
        """This worker's `WindowFigures` of the window that `step` ends, and the seconds of each step in it."""
        # Reading the loss waits for the device, so the step times are complete after it.
        own_loss, (bad_loss_step, bad_gradient_step) = float(mean.loss), engine.guard.read()
        ort_active = float(self._is_ort_active())
        step_seconds = self._clock.read()
        steps = max(1, self._window.steps)
        figures: dict[str, float | list[float]] = {
            "loss": own_loss,
            "bad_loss_step": bad_loss_step,
            "bad_gradient_step": bad_gradient_step,
            "ort_active": ort_active,
            "own_seconds": self.own_time.read() / steps,
            "step_seconds": sum(step_seconds) / steps,
            "system": self._system.sampler.window(steady=steady, now=step == self._cfg.steps),
            "measured": list(measured.values()),
            "own": self._own_values(mean.values()),
        }
        return figures, step_seconds

    def _own_values(self, values: dict[str, float]) -> list[float]:
        """What the user's step has returned, in an order that all workers share."""
        if self._names is None:
            everyone = values_of_all(sorted(values)) if self._has_values else []
            self._names = sorted(set().union(*everyone))
        if unknown := values.keys() - set(self._names):
            raise RequestError(
                f"the value {min(unknown)} of train.step or run.log was there on no worker at the first step: give the "
                "same names from the beginning"
            )
        return [values.get(name, math.nan) for name in self._names]

    def _named(self, everyone: torch.Tensor) -> dict[str, float]:
        """The mean of each own value over the workers that have it."""
        means = everyone.nanmean(dim=0).tolist() if everyone.numel() else []
        return {
            f"train/{name}": mean for name, mean in zip(self._names or [], means, strict=True) if not math.isnan(mean)
        }

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        """Journals an evaluation, whose time belongs to no step."""
        if self._journal is not None:
            self._journal.metrics(step, metrics)
        self._clock.restart()

    def finish(self, step: int) -> None:
        """Journals the run's summary, and prints a warning for everything that makes its figures unreliable."""
        sampler = self._system.sampler
        other_seconds, total_seconds = sampler.other_seconds()
        everyone = SummaryFigures.gathered(
            self._workers,
            peak_memory_gib=peak_memory_gib(self._workers.device),
            other_seconds=other_seconds,
            total_seconds=total_seconds,
            throttled=-1.0 if sampler.throttled is None else float(sampler.throttled),
        )
        if self._journal is None:
            return
        summary = self._steady.summary(self._workers.world_size)
        summary["summary/peak_memory_gib"] = float(everyone.peak_memory_gib.max())
        summary["summary/last_step"] = float(step)
        measured = zip(everyone.other_seconds.tolist(), everyone.total_seconds.tolist(), strict=True)
        shares = [100.0 * other / total for other, total in measured if total > 0]
        if shares:
            summary["summary/other_cpu_percent"] = sum(shares) / len(shares)
        self._journal.metrics(step, summary)
        throttled = everyone.throttled.tolist()
        if max(throttled) >= 0:
            self._journal.tags({"ortlaunch.throttled": str(max(throttled) > 0).lower()})
        for warning in self._warnings(shares, [rank for rank, value in enumerate(throttled) if value > 0]):
            print(f"warning: {warning}", flush=True)

    def _warnings(self, shares: list[float], throttled: list[int]) -> Iterator[str]:
        """The reasons why the run's figures may be unreliable.

        Args:
            shares: of each machine, what other processes used of its cores in the steady windows, in percent.
            throttled: ranks of the workers whose GPU's clocks were held down.
        """
        nodes = self._system.nodes
        busy = [(share, host) for share, host in zip(shares, nodes.hosts, strict=False) if share >= _BUSY_PERCENT]
        if busy:
            share, host = max(busy)
            where = "this machine was" if len(shares) == 1 else f"{len(busy)} of {len(shares)} machines were"
            most = "" if len(shares) == 1 else f", {host} the most"
            yield f"{where} busy with other work: {share:.0f} % of its cores{most}; figures may not repeat"
        if throttled:
            names = ", ".join(f"rank {rank} on {nodes.host_of(rank)}" for rank in throttled[:8])
            yield f"heat or a lack of power held GPUs down ({names}); figures may not repeat"
        if (found := self._stragglers.straggler()) is not None:
            rank, percent = found
            yield (
                f"rank {rank} on {nodes.host_of(rank)} holds the others up: before they meet, it takes {percent:.0f} % "
                "of a step longer than they do (stragglers/spread_percent)"
            )

    def startup(self, values: dict[str, float]) -> None:
        """Journals start-up times at the step after which this attempt starts."""
        if self._journal is not None:
            self._journal.metrics(self._start_step, values)

    def _note_ort(self, active: bool) -> None:
        """Journals the tag when it changes: it is true only while every worker was active at every log step."""
        self._worst_ort_active &= active
        if self._journal is not None and self._worst_ort_active != self._ort_active:
            self._ort_active = self._worst_ort_active
            self._journal.tags({"ortlaunch.ort_active": str(self._ort_active).lower()})


def _training_metrics(
    step: int, everyone: WindowFigures, grad_norm: torch.Tensor | float | None, lr: float, loss_scale: float | None
) -> dict[str, float]:
    metrics = {"train/loss": float(everyone.loss.mean()), "train/lr": lr}
    if grad_norm is not None:
        metrics["train/grad_norm"] = float(grad_norm)
    if loss_scale is not None:
        _check_scale(step, loss_scale)
        metrics["train/loss_scale"] = loss_scale
    return metrics


def _check_finite(losses: list[float], gradients: list[float]) -> None:
    """Raises if a worker has had a step with a loss, or with gradients, that were not finite.

    Args:
        losses: of each worker, its first step with such a loss; 0 for none.
        gradients: of each worker, its first step with such gradients; 0 for none.
    """
    advice = "the weights are those before it. Lower optimizer.lr, set train.clip_grad_norm, or look at the data"
    if any(losses):
        step = min(filter(None, losses))
        ranks = ", ".join(str(rank) for rank, first in enumerate(losses) if first == step)
        raise TrainingError(f"the loss is not finite at step {step:.0f} on rank {ranks}; {advice}")
    if any(gradients):
        step = min(filter(None, gradients))
        raise TrainingError(f"the gradients are not finite at step {step:.0f}, and the loss is; {advice}")


def _check_scale(step: int, scale: float) -> None:
    if scale < _LEAST_LOSS_SCALE:
        raise TrainingError(
            f"train.precision=fp16: the gradients overflow at every loss scale, which is {scale} at step {step}: use "
            "train.precision=bf16 or fp32, or lower optimizer.lr"
        )


def seconds_since(started: float) -> float:
    """Seconds since a time that another process of this machine took, in seconds since the epoch; never negative."""
    return max(0.0, time.time() - started)  # The clock may have been set back.
