"""One worker's run: its place and record, and what all workers do together between steps."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from ortlaunch.base.errors import TrainingError
from ortlaunch.config.schema import Config
from ortlaunch.data.batch import Batch
from ortlaunch.run import checkpoints as store
from ortlaunch.run.run import Run, Stopped
from ortlaunch.run.state import FIRST_STEP, STEPS_TAG
from ortlaunch.trainer.backend_run import BackendRun
from ortlaunch.trainer.best import BestSoFar
from ortlaunch.trainer.checkpoint import resume, rng
from ortlaunch.trainer.checkpoint.own_buffers import OwnBuffers
from ortlaunch.trainer.checkpoint.saver import Saver, Written, must_be_written
from ortlaunch.trainer.engine import Engine
from ortlaunch.trainer.feed import Feed, Micro
from ortlaunch.trainer.garbage import collected_every
from ortlaunch.trainer.mean import Mean
from ortlaunch.trainer.recorder import Recorder, seconds_since
from ortlaunch.trainer.stop import StopRequests
from ortlaunch.trainer.system_info import SystemInfo
from ortlaunch.trainer.watch import Watch
from ortlaunch.trainer.workers import Workers, separate_group, set_time_limits

SCRIPT = "script"
"""In a worker's file of a checkpoint: what a script keeps of its own."""


class Data(Protocol):
    """Where micro-batches come from."""

    @property
    def fingerprint(self) -> str:
        """A text by which the data is known again."""

    @property
    def samples(self) -> int | None:
        """How many samples there are to train on; None for a stream."""

    def close(self) -> None:
        """Ends its processes."""


class Trained(Protocol):
    """What a session trains, beside its engine, as far as it saves and journals it."""

    @property
    def loader(self) -> Data:
        """The data."""

    @property
    def buffers(self) -> OwnBuffers:
        """The model's buffers, as they were built."""

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Shape of each parameter and buffer, by name."""

    @property
    def base(self) -> str:
        """Digest of the weights under an adapter, which checkpoints leave out; empty without one."""

    @property
    def reading(self) -> dict[str, Any]:
        """What a position in a stream depends on; see `resume.reading_of`."""

    @property
    def backend(self) -> BackendRun:
        """What acts for the backend."""

    @property
    def startup(self) -> dict[str, float]:
        """Start-up times so far, by metric name."""


class Session:
    """Counts the steps of a run, logs and saves them, and agrees with the other workers on when to stop.

    Attributes:
        config: the run's configuration.
        run: its folder.
        workers: this worker's place.
        launched: when the launcher started the run, in seconds since the epoch.
        entered: when this worker began to set up its training, on the clock of `time.perf_counter`.
        attempt: how often torchrun and the scheduler have restarted the workers, in all jobs of the run.
        watch: ends this worker when it makes no progress.
        journal: the run's journal on the first worker, None on the others.
        control: all workers, on the CPU, for start-up and for requests to stop.
        system: the machines of the run.
        start: the checkpoint from which the run goes on.
        stopped_at: the step at which a request to stop ended the training; None while it goes on.
        step: the one that is being taken, or has ended last.
        batch: the micro-batch that was trained on last, on the device.
        logged: the figures that were logged last, by name.
        own: objects of the user by name, whose `state_dict` is in checkpoints.
        values: of the evaluation after the current step; empty where there was none.
        best: compares evaluations; None without them.
        last_step: the run's last one, which ``train.patience`` may bring forward.
    """

    engine: Engine
    recorder: Recorder
    batch: Batch
    stop_signals: tuple[signal.Signals, ...] = ()
    """Those that ask to stop beside the usual ones."""
    _built: Trained
    _feed: Feed
    _saver: Saver
    _stop: StopRequests

    def __init__(self, config: Config, run_dir: Path, workers: Workers, launched: float) -> None:
        """Starts the watch, opens the journal and exchanges facts about the machines; all workers call it."""
        self.entered = time.perf_counter()
        self.config = config
        self.run = Run(run_dir)
        self.workers = workers
        self.launched = launched
        self.attempt = _counted("TORCHELASTIC_RESTART_COUNT", "ORTLAUNCH_ATTEMPT")
        self.watch = Watch(
            run_dir,
            workers.rank,
            workers.world_size,
            first_seconds=config.trainer.timeout_seconds,
            seconds=config.launcher.timeout_seconds,
        )
        self.watch.start()
        self.journal = self.run.journal(is_patient=True) if workers.is_first else None
        # Two groups: a thread that writes a checkpoint uses one of them while the main thread uses the other.
        self._writers, self.control = separate_group(config), separate_group(config)
        self.system = SystemInfo(workers, self.control, run_dir)
        self.start = resume.Start()
        self._bad_loss = 0
        self.stopped_at: int | None = None
        self.step = 0
        self.logged: dict[str, float] = {}
        self.own: dict[str, Any] = {}
        self.values: dict[str, float] = {}
        self.best: BestSoFar | None = None
        self.last_step = config.train.steps

    def find_checkpoint(self) -> None:
        """Sets `start`; all workers call it.

        Raises:
            RequestError: ``train.resume`` names no complete checkpoint, or one that does not fit this run.
        """
        # `ortlaunch resume` is a new launch, whose first attempt follows its keys.
        restarts = _counted("TORCHELASTIC_RESTART_COUNT", "ORTLAUNCH_RESTARTS")
        self.start = resume.find(self.config, self.run.path, self.workers, self.control, attempt=restarts)

    def set_duration(self, config: Config) -> None:
        """Takes the configuration in which all durations are steps.

        Raises:
            RequestError: the checkpoint is beyond them.
        """
        if self.journal is not None and not self.config.train.counts_steps:
            self.journal.tags({STEPS_TAG: str(config.train.steps)})
        self.config, self.last_step = config, config.train.steps
        if self.start.path is not None:
            store.check_steps(self.start.path, config.train.steps)

    def begin(self, built: Trained, feed: Feed, recorder: Recorder) -> None:
        """Gets ready for the first step, from which on a request to stop is followed; all workers call it.

        Args:
            built: what is trained.
            feed: its micro-batches.
            recorder: counts and journals.
        """
        self._built, self._feed, self.recorder = built, feed, recorder
        self.step = self.start.step
        self.engine.forward_done = recorder.own_time.end
        self._saver = Saver(
            store.Store(
                self.run.checkpoints, self.config.train.keep_checkpoints, "" if self.best is None else self.best.name
            ),
            self.workers,
            self._writers,
            built.buffers,
            sends_buffers=self.engine.sends_buffers,
        )
        self._stop = StopRequests(
            self.run.path,
            self.control,
            is_first=self.workers.is_first,
            grace_seconds=self.config.launcher.grace_seconds,
            signals=self.stop_signals,
        )
        self._stop.listen()
        self.system.sampler.start()

    def steps(self) -> Iterator[int]:
        """The numbers of the steps to take, counted from 1: to the last one, or until all workers stop."""
        cfg = self.config.train
        self.recorder.restart_clock()
        with collected_every(cfg.gc_every) as self._collect:
            for step in range(self.start.step + 1, cfg.steps + 1):
                self.engine.guard.step = self.step = step
                self.values = {}
                yield step
                if self.stopped_at is not None:
                    return
                if step == self.last_step:
                    break
        self.recorder.finish(self.last_step)

    def micro_batches(self) -> Iterator[Micro]:
        """The micro-batches of a step, which are counted; what comes before each backward is this worker's own time."""
        own_time, feed = self.recorder.own_time, self._feed
        waited, count = feed.waited, self.config.train.grad_accumulation
        feed.begin_step(count)
        for index in range(count):
            own_time.begin()
            batch = feed.take()
            self.recorder.micro_batch(batch, feed.samples)
            self.watch.beat()
            self.batch = batch
            yield Micro(batch, index, last=index == count - 1, weight=feed.weight)
            own_time.begin()
            feed.prefetch()
            own_time.end()
        self.recorder.waited_for_data(feed.waited - waited)

    def step_done(self, step: int) -> None:
        """Right after the optimizer's step."""
        self._collect(step)
        self.recorder.step_done()
        if step == self.start.step + 1:
            self._first_step_done()

    def log(self, step: int, mean: Mean, grad_norm: torch.Tensor | float | None, lr: float) -> None:
        """Journals a step, in one collective of all workers.

        Args:
            step: the step that has ended.
            mean: its loss and values on this worker.
            grad_norm: see `Engine.step`.
            lr: the learning rate of the step.

        Raises:
            RequestError: the workers have used different weights where the trainer cannot.
            TrainingError: a loss or a gradient was not finite; the weights are those before that step.
        """
        self.engine.check_agreement()
        self.logged |= self.recorder.log(step, mean, grad_norm, lr, self.engine)

    def is_logged(self, step: int) -> bool:
        """Whether a step is journalled, also where no evaluation or checkpoint asks for it."""
        return self.recorder.is_log_step(step) or self.engine.known_discarded

    def scored(self, step: int, values: dict[str, float]) -> None:
        """Takes the values of an evaluation, after which the run may end early; they are the same on all workers."""
        self.values = values
        self.logged |= values
        if self.best is not None:
            self.best.take(values)
            if self.best.gives_up and step < self.last_step:
                self.last_step = step
                if self.journal is not None:
                    text = f"{self.best.name} has not become better in {self.config.train.patience} evaluations"
                    print(f"step {step} is the last one: {text} (train.patience)", flush=True)
                    self.journal.tags({"ortlaunch.ended_early": text})

    def saves(self, step: int) -> bool:
        """Whether a checkpoint follows a step. All workers ask at the end of each, and agree here on a request to stop.

        Raises:
            RequestError: as for `log`.
            TrainingError: the run is asked to stop and there is nothing good to save.
        """
        self.watch.step_done(step)
        self._report(self._saver.ended())
        if self._stop.agreed() and step < self.last_step:
            self.stopped_at = step
        every = self.config.train.checkpoint_every
        assert not isinstance(every, str)
        # Also after the last step, so that a finished run can be resumed with more steps.
        is_due = every is not None and (step % every == 0 or step == self.last_step)
        is_best = bool(self.values) and self.best is not None and self.best.is_asked and self.best.is_better
        if self.stopped_at is None and not is_due and not is_best:
            return False
        self.engine.check_agreement()
        self._bad_loss, bad_gradients = self.engine.guard.read()
        if bad_gradients and self.stopped_at is not None:
            raise TrainingError("a gradient is not finite since the last log step: there is nothing good to save")
        # All workers have skipped the steps whose numbers were not finite; the next log step will end the run.
        return not bad_gradients

    def save(self, step: int, of_script: dict[str, Any] | None = None) -> None:
        """Copies the state, and begins to write the checkpoint; all workers call it.

        Args:
            step: the step that has ended.
            of_script: what a script keeps of its own on this worker, as plain values and tensors that nothing changes.
        """
        begin, cfg = time.perf_counter(), self.config.train
        # In fp16 only this worker knows of its loss, since gradients that are not finite are usual there.
        refusal = f"its loss was not finite at step {self._bad_loss}" if self._bad_loss else ""
        # The saver would wait for the earlier checkpoint, too, but without pausing the watch.
        ended = self._wait()
        # Captured before the snapshot, which may draw random numbers.
        position = self._feed.position
        own = {"position": {**position.as_dict(), "states": position.states}, "rng": rng.capture()}
        own |= {"step": self.engine.task.state(), "hooks": _states(self.own), SCRIPT: of_script or {}}
        is_last = self.stopped_at is not None or step == self.last_step
        # Without a step beside its writing, a checkpoint needs no copy and no memory for one.
        shared = is_last or not cfg.checkpoint_async
        ended += self._saver.save(
            step,
            self.engine.snapshot,
            own,
            {**self._facts(step), **self._evaluated()},
            refusal,
            shared=shared,
            keep_memory=not shared and cfg.copied_checkpoints(after=step) > 0,
        )
        if shared and not is_last:
            ended += self._wait()  # For the last one, `finish` waits.
        stall = time.perf_counter() - begin
        self._report(ended)
        if self.journal is not None:
            self.journal.metrics(step, {"checkpoint/stall_seconds": stall})
        # The time of a checkpoint belongs to no step.
        self.recorder.restart_clock()

    def note_stopped(self, reason: str) -> None:
        """The first worker notes at which step and with which checkpoint the run has stopped.

        Args:
            reason: who asked for it.
        """
        assert self.journal is not None
        assert self.stopped_at is not None
        checkpoint = self.run.checkpoints / store.name_of(self.stopped_at)
        self.run.note_stopped(Stopped(self.stopped_at, str(checkpoint), reason))
        self.journal.tags({"ortlaunch.resumable": "true", "ortlaunch.stopped_at_step": str(self.stopped_at)})

    def ask_to_stop(self) -> None:
        """Ends the run at one of the next steps, as a signal would."""
        self._stop.ask()

    def finish(self) -> None:
        """After the last step: waits for the checkpoint that is being written, and ends the loader's processes.

        Raises:
            TrainingError: the checkpoint of a stopped run cannot be written.
        """
        self.system.sampler.stop()
        self._stop.close()
        written = self._wait()
        self._report(written)
        if self.stopped_at is not None:
            must_be_written(written)
        self._built.loader.close()

    @contextlib.contextmanager
    def finishing_checkpoints(self) -> Iterator[None]:
        """After a failure in the block, waits for the checkpoint that is being written: the run can go on from it."""
        try:
            yield
        except BaseException:
            # A failure of its own, as where another worker has died, must not hide what ends the run.
            with contextlib.suppress(Exception):
                self._report(self._wait(self.config.launcher.grace_seconds))
            raise

    def _first_step_done(self) -> None:
        """Journals the start-up times: the first step, with export and compilation, is a part of the start."""
        set_time_limits(self.config, self.workers)
        startup = {**self._built.startup, FIRST_STEP: seconds_since(self.launched)}
        self.recorder.startup(startup | self._built.backend.first_step_done())

    def _facts(self, step: int) -> dict[str, Any]:
        """The facts with which `resume` decides whether and where a run can continue."""
        config, loader = self.config, self._built.loader
        return {
            "step": step,
            "tokens": self.recorder.tokens_seen,
            "workers": self.workers.world_size,
            "kind": resume.kind_of(config),
            "precision": config.train.precision.value,
            "optimizer": resume.optimizer_of(config),
            "seed": config.seed,
            "data": loader.fingerprint,
            "samples": loader.samples,
            "reading": self._built.reading,
            "position": self._feed.position.as_dict(),
            "mlflow_run_id": self.run.mlflow_run_id(),
            "time": time.time(),
            "shapes": self._built.shapes,
            "base": self._built.base,
        }

    def _evaluated(self) -> dict[str, Any]:
        """What a checkpoint keeps of the evaluation after its step, and of those before it."""
        facts: dict[str, Any] = {"eval_loss": self.values.get("eval/loss")}
        if self.best is not None:
            facts |= {"score": self.best.score if self.values else None, "best": self.best.state()}
        return facts

    def _wait(self, seconds: float | None = None) -> list[Written]:
        """Waits for the checkpoint that is being written; a slow disk is no reason for the watch to end the run."""
        with self.watch.paused():
            return self._saver.wait(seconds)

    def _report(self, written: list[Written]) -> None:
        if self.journal is None:
            return
        for one in written:
            if one.error:
                text = f"the checkpoint of step {one.step} could not be written, training goes on: {one.error}"
                print(f"warning: {text}", flush=True)
                self.journal.tags({"ortlaunch.checkpoint_failure": text})
            else:
                if one.untidy:
                    text = f"the checkpoint of step {one.step} is complete, but its links or older ones are not tidied"
                    print(f"warning: {text}: {one.untidy}", flush=True)
                self.journal.metrics(one.step, {"checkpoint/write_seconds": one.seconds})


def _states(objects: dict[str, Any]) -> dict[str, Any]:
    return {name: one.state_dict() for name, one in objects.items() if hasattr(one, "state_dict")}


def _counted(*names: str) -> int:
    """The sum of counts that torchrun and the scheduler's launcher have left in the environment."""
    return sum(int(os.environ.get(name, "0")) for name in names)
