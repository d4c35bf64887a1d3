"""What a worker does at the end of a step: checkpoints, requests to stop, and the sign that it makes progress."""

from __future__ import annotations

import contextlib
import time

from ortlaunch.base.errors import TrainingError
from ortlaunch.config.schema import TrainConfig
from ortlaunch.run.journal import Journal
from ortlaunch.trainer.checkpoint import rng
from ortlaunch.trainer.checkpoint.saver import Saver, Written, must_be_written
from ortlaunch.trainer.checkpoint_facts import CheckpointFacts
from ortlaunch.trainer.engine import Engine
from ortlaunch.trainer.recorder import Recorder
from ortlaunch.trainer.stop import StopRequests
from ortlaunch.trainer.watch import Watch


class StepEnd:
    """Called by every worker at the end of every step."""

    def __init__(
        self,
        cfg: TrainConfig,
        engine: Engine,
        saver: Saver,
        stop: StopRequests,
        watch: Watch,
        recorder: Recorder,
        journal: Journal | None,
        facts: CheckpointFacts,
    ) -> None:
        """
        Args:
            cfg: when to save.
            engine: the wrapped model.
            saver: writes checkpoints.
            stop: the requests to stop.
            watch: ends this worker when it makes no progress.
            recorder: its clock leaves out the time of a checkpoint.
            journal: the run's journal on the first worker, None on the others.
            facts: what a checkpoint holds apart from the engine's state.
        """
        self._cfg = cfg
        self._engine = engine
        self._saver = saver
        self._stop = stop
        self._watch = watch
        self._recorder = recorder
        self._journal = journal
        self._facts = facts
        self.stopped_at: int | None = None
        """The step at which a request to stop ended the training; None while it goes on."""

    def run(self, step: int, eval_loss: float | None = None) -> bool:
        """Saves a checkpoint if one is due, and asks whether the run is to stop.

        Args:
            step: the number of the step that has ended, counted from 1.
            eval_loss: the loss of the evaluation after it, if there was one; the lowest makes the ``best`` checkpoint.

        Returns:
            Whether training stops here.

        Raises:
            TrainingError: the run is asked to stop and its checkpoint cannot be written.
        """
        self._watch.step_done(step)
        self._report(self._saver.ended())
        stop = self._stop.agreed() and step < self._cfg.steps
        every = self._cfg.checkpoint_every
        # Also after the last step, so that a finished run can be resumed with more steps.
        due = stop or (every is not None and (step % every == 0 or step == self._cfg.steps))
        if due:
            self._engine.check_agreement()
        bad_loss, bad_gradients = self._engine.guard.read() if due else (0, 0)
        # All workers have skipped the steps whose numbers were not finite; the next log step will end the run.
        spoiled = bad_gradients > 0
        if spoiled and stop:
            raise TrainingError("a gradient is not finite since the last log step: there is nothing good to save")
        if due and not spoiled:
            # In fp16 only this worker knows of its loss, since gradients that are not finite are usual there.
            refusal = f"its loss was not finite at step {bad_loss}" if bad_loss else ""
            self._save(step, eval_loss, refusal, is_last=stop or step == self._cfg.steps)
        if stop:
            self.stopped_at = step
        return stop

    def beat(self) -> None:
        """Progress within a step."""
        self._watch.beat()

    def finish(self) -> None:
        """After the last step: waits for the checkpoint that is being written."""
        self._stop.close()
        written = self._wait()
        self._report(written)
        if self.stopped_at is not None:
            must_be_written(written)

    def give_up(self, seconds: float) -> None:
        """After a failure: waits for the checkpoint that is being written, from which the run can go on.

        Args:
            seconds: the longest wait.
        """
        # Its own failure, as where another worker has died, must not hide what ends the run.
        with contextlib.suppress(Exception):
            self._report(self._wait(seconds))

    def _save(self, step: int, eval_loss: float | None, refusal: str, *, is_last: bool) -> None:
        begin = time.perf_counter()
        # The saver would wait for the earlier checkpoint, too, but without pausing the watch.
        ended = self._wait()
        meta = {**self._facts.of_run(step), "eval_loss": eval_loss}
        # Captured before the snapshot, which may draw random numbers.
        own = {**self._facts.of_worker(), "rng": rng.capture()}
        # Without a step beside its writing, a checkpoint needs no copy and no memory for one.
        shared = is_last or not self._cfg.checkpoint_async
        ended += self._saver.save(
            step,
            self._engine.snapshot,
            own,
            meta,
            refusal,
            shared=shared,
            keep_memory=not shared and self._cfg.copied_checkpoints(after=step) > 0,
        )
        if shared and not is_last:
            ended += self._wait()  # For the last one, `finish` waits.
        stall = time.perf_counter() - begin
        self._report(ended)
        if self._journal is not None:
            self._journal.metrics(step, {"checkpoint/stall_seconds": stall})
        # The time of a checkpoint belongs to no step.
        self._recorder.restart_clock()

    def _wait(self, seconds: float | None = None) -> list[Written]:
        """Waits for the checkpoint that is being written; a slow disk is no reason for the watch to end the run."""
        with self._watch.paused():
            return self._saver.wait(seconds)

    def _report(self, written: list[Written]) -> None:
        if self._journal is None:
            return
        for one in written:
            if one.error:
                text = f"the checkpoint of step {one.step} could not be written, training goes on: {one.error}"
                print(f"warning: {text}", flush=True)
                self._journal.tags({"ortlaunch.checkpoint_failure": text})
            else:
                if one.untidy:
                    text = f"the checkpoint of step {one.step} is complete, but its links or older ones are not tidied"
                    print(f"warning: {text}: {one.untidy}", flush=True)
                self._journal.metrics(one.step, {"checkpoint/write_seconds": one.seconds})
