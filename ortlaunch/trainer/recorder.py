"""Turns what happens in the loop into journal events, without a host sync off log steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from ortlaunch.base.errors import TrainingError
from ortlaunch.config.schema import TrainConfig
from ortlaunch.metrics.at_log_steps import worker_metrics
from ortlaunch.metrics.memory import peak_memory_gib
from ortlaunch.metrics.stragglers import OwnTime, Tally, straggler_metrics
from ortlaunch.metrics.system import WIDTH
from ortlaunch.metrics.throughput import Steady, StepClock, Window, window_metrics
from ortlaunch.models.task import Batch
from ortlaunch.run.journal import Journal
from ortlaunch.trainer.engine import Engine
from ortlaunch.trainer.surroundings import Surroundings
from ortlaunch.trainer.workers import Workers

_SHARED = 6 + WIDTH
"""Figures that each worker shares at a log step, before what `metrics/worker/` measures: loss, first bad loss and
gradient, whether ONNX Runtime is active, its own time, its step time, and what it has sampled."""

_BUSY_PERCENT = 10.0
"""Of a machine's cores in others' use, from which on it is said."""

_LEAST_LOSS_SCALE = 2.0**-14
"""Below it not even the smallest loss scale keeps the gradients finite: half of what an fp16 number can be small."""


class Recorder:
    """Counts steps on every worker; the first worker journals what all of them saw."""

    def __init__(
        self,
        cfg: TrainConfig,
        workers: Workers,
        journal: Journal | None,
        surroundings: Surroundings,
        *,
        is_ort_active: Callable[[], bool],
        flops_per_sample: float | None,
        peak_flops: float | None,
        start_step: int = 0,
        tokens_seen: int = 0,
    ) -> None:
        """
        Args:
            cfg: when to log.
            workers: this worker's place.
            journal: the run's journal on the first worker, None on the others.
            surroundings: the machines, and this worker's look at its own.
            is_ort_active: whether ONNX Runtime really runs this worker's model.
            flops_per_sample: operations of forward and backward for one sample; None where unknown.
            peak_flops: the device's peak in operations per second; None where unknown.
            start_step: steps that an earlier attempt has done.
            tokens_seen: tokens that all workers have seen in them.
        """
        self.tokens_seen = tokens_seen
        self.own_time = OwnTime(workers.device)
        """What this worker does before it waits for others; marked by the loop."""
        self._start_step = start_step
        self._cfg = cfg
        self._workers = workers
        self._journal = journal
        self._surroundings = surroundings
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
        """The first step begins now."""
        self._clock.restart()

    def waited_for_data(self, seconds: float) -> None:
        """Counts time in which the loop had no batch."""
        self._window.data_wait_seconds += seconds

    def micro_batch(self, batch: Batch) -> None:
        """Counts what goes through the model."""
        self._window.samples += next(iter(batch.values())).shape[0]
        if "input_ids" in batch:
            self._window.tokens += batch["input_ids"].numel()
            self.tokens_seen += batch["input_ids"].numel() * self._workers.world_size

    def step_done(self) -> None:
        """Marks the end of an optimizer step."""
        self._clock.step_done()
        self._window.steps += 1

    def disturbed(self) -> None:
        """The last step took longer than by itself: its window is left out of the summary of the run."""
        self._window_disturbed = True
        self._clock.restart()

    def is_log_step(self, step: int) -> bool:
        """Whether `step` (counted from 1) ends a window: the first, the last, where the steady part begins, and every
        ``train.log_every`` steps."""
        return step in (1, self._cfg.steady_after, self._cfg.steps) or step % self._cfg.log_every == 0

    def log(
        self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor | float | None, lr: float, engine: Engine
    ) -> None:
        """Ends a window: one collective, then the first worker's line in the journal.

        Raises:
            TrainingError: a loss or gradient was not finite on some worker, at this step or since the last log step.
        """
        # A window that began after the first steps of this attempt, in which export and compilation are.
        steady = not self._window_disturbed and step - self._window.steps >= self._start_step + self._cfg.steady_after
        measured = worker_metrics(self._workers.device)
        # Reading the loss waits for the device, so the step times are complete after it.
        shared = [float(loss), *engine.guard.read(), float(self._is_ort_active())]
        step_seconds = self._clock.read()
        steps = max(1, self._window.steps)
        shared += [self.own_time.read() / steps, sum(step_seconds) / steps]
        shared += self._surroundings.sampler.window(steady=steady, now=step == self._cfg.steps)
        everyone = self._workers.gather([*shared, *measured.values()])
        _check_finite(everyone[:, 1], everyone[:, 2])
        self._note_ort(bool(everyone[:, 3].min() > 0))
        metrics = {"train/loss": float(everyone[:, 0].mean()), "train/lr": lr}
        if grad_norm is not None:
            metrics["train/grad_norm"] = float(grad_norm)
        if (scale := engine.loss_scale) is not None:
            _check_scale(step, scale)
            metrics["train/loss_scale"] = scale
        metrics |= window_metrics(
            self._window,
            step_seconds,
            world_size=self._workers.world_size,
            flops_per_sample=self._flops_per_sample,
            peak_flops=self._peak_flops,
        )
        metrics |= dict(zip(measured, everyone[:, _SHARED:].amax(dim=0).tolist(), strict=True))
        metrics["throughput/steady"] = float(steady)
        stragglers = straggler_metrics(everyone[:, 4].tolist(), everyone[:, 5].tolist())
        metrics |= stragglers
        metrics |= self._surroundings.nodes.metrics(everyone[:, 6:_SHARED].tolist(), everyone[:, _SHARED].tolist())
        if steady:
            self._steady.add(self._window, step_seconds)
            self._stragglers.add(stragglers)
        self._window, self._window_disturbed = Window(), False
        if self._journal is not None:
            self._journal.metrics(step, metrics)
        # The journal's own time belongs to no step.
        self._clock.restart()

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        """Journals an evaluation, whose time belongs to no step."""
        if self._journal is not None:
            self._journal.metrics(step, metrics)
        self._clock.restart()

    def finish(self, step: int) -> None:
        """Journals the run's summary, and says what speaks against its figures."""
        sampler = self._surroundings.sampler
        throttled = -1.0 if sampler.throttled is None else float(sampler.throttled)
        mine = [peak_memory_gib(self._workers.device), *sampler.other_seconds(), throttled]
        peaks, others, totals, slowed = self._workers.gather(mine).T.tolist()
        if self._journal is None:
            return
        summary = self._steady.summary(self._workers.world_size) | {"summary/peak_memory_gib": max(peaks)}
        summary["summary/last_step"] = float(step)
        shares = [100.0 * other / total for other, total in zip(others, totals, strict=True) if total > 0]
        if shares:
            summary["summary/other_cpu_percent"] = sum(shares) / len(shares)
        self._journal.metrics(step, summary)
        if max(slowed) >= 0:
            self._journal.tags({"ortlaunch.throttled": str(max(slowed) > 0).lower()})
        for warning in self._warnings(shares, [rank for rank, value in enumerate(slowed) if value > 0]):
            print(f"warning: {warning}", flush=True)

    def _warnings(self, shares: list[float], slowed: list[int]) -> Iterator[str]:
        """What makes the run's figures worth less than they look.

        Args:
            shares: of each machine, what others used of its cores in the steady windows, in percent.
            slowed: workers whose GPU was held down.
        """
        nodes = self._surroundings.nodes
        busy = [(share, host) for share, host in zip(shares, nodes.hosts, strict=False) if share >= _BUSY_PERCENT]
        if busy:
            share, host = max(busy)
            where = "this machine was" if len(shares) == 1 else f"{len(busy)} of {len(shares)} machines were"
            most = "" if len(shares) == 1 else f", {host} the most"
            yield f"{where} busy with other work: {share:.0f} % of its cores{most}; figures may not repeat"
        if slowed:
            names = ", ".join(f"rank {rank} on {nodes.host_of(rank)}" for rank in slowed[:8])
            yield f"heat or a lack of power held GPUs down ({names}); figures may not repeat"
        if (found := self._stragglers.straggler()) is not None:
            rank, percent = found
            yield (
                f"rank {rank} on {nodes.host_of(rank)} holds the others up: before they meet, it takes {percent:.0f} % "
                "of a step longer than they do (stragglers/spread_percent)"
            )

    def startup(self, values: dict[str, float]) -> None:
        """Journals start-up times, at the step after which this attempt goes on: MLflow takes one value of a step."""
        if self._journal is not None:
            self._journal.metrics(self._start_step, values)

    def _note_ort(self, active: bool) -> None:
        """Keeps the tag true: active only if every worker was, at every log step."""
        self._worst_ort_active &= active
        if self._journal is not None and self._worst_ort_active != self._ort_active:
            self._ort_active = self._worst_ort_active
            self._journal.tags({"ortlaunch.ort_active": str(self._ort_active).lower()})


def _check_finite(losses: torch.Tensor, gradients: torch.Tensor) -> None:
    """Looks at each worker's first step with a loss that is not finite, and with gradients, 0 standing for none."""
    advice = "the weights are those before it. Lower optimizer.lr, set train.clip_grad_norm, or look at the data"
    if bool((losses > 0).any()):
        step = int(losses[losses > 0].min())
        ranks = ", ".join(str(rank) for rank, first in enumerate(losses.tolist()) if first == step)
        raise TrainingError(f"the loss is not finite at step {step} on rank {ranks}; {advice}")
    if bool((gradients > 0).any()):
        step = int(gradients[gradients > 0].min())
        raise TrainingError(f"the gradients are not finite at step {step}, and the loss is; {advice}")


def _check_scale(step: int, scale: float) -> None:
    if scale < _LEAST_LOSS_SCALE:
        raise TrainingError(
            f"train.precision=fp16: the gradients overflow at every loss scale, which is {scale} at step {step}: use "
            "train.precision=bf16 or fp32, or lower optimizer.lr"
        )


def since(started: float) -> float:
    """Seconds since a moment given in seconds since the epoch, as another process of this machine noted it."""
    return time.time() - started
