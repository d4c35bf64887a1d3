"""What a run does for its backend after wrapping the model: nothing for PyTorch; for ONNX Runtime the check at the
start, the record of what really ran, and an orderly end."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ortlaunch.base.counting import is_power_of_two
from ortlaunch.base.errors import FindingError, RequestError, WrongGradientsError
from ortlaunch.config.schema import FIRST_RECHECK, Allow, Config, OrtConfig
from ortlaunch.config.trainers import trainer_of
from ortlaunch.data.batch import Batch, moved
from ortlaunch.models.task import Task
from ortlaunch.ort.module.by_size import Sizes
from ortlaunch.ort.verify.sizes import Evaluated, is_new, sizes_of
from ortlaunch.run.journal import Journal
from ortlaunch.run.run import Run
from ortlaunch.trainer.engine import Engine
from ortlaunch.trainer.figures import Figures
from ortlaunch.trainer.hooks import Hook
from ortlaunch.trainer.workers import Workers

if TYPE_CHECKING:
    from ortlaunch.ort.tracing.decisions import Decision
    from ortlaunch.ort.verify.fitting import Fitting


class BackendRun(Hook):
    """Eager PyTorch and torch.compile: what they compute is what PyTorch computes."""

    check_batches = 0
    """Batches that `check` needs in addition to the first."""

    def check(self, task: Task, batches: list[Batch]) -> dict[str, float]:
        """Refuses a model that the backend would compute wrongly; called before the first step.

        Args:
            task: how the model is called.
            batches: the run's first batches, on the CPU; training gets them again.

        Returns:
            Start-up metrics.

        Raises:
            FindingError: with the finding and its remedy.
            RequestError: the backend cannot train the model.
        """
        return {}

    @property
    def is_active(self) -> bool:
        """Whether ONNX Runtime really ran this worker's last training step."""
        return False

    def first_step_done(self) -> dict[str, float]:
        """Journals facts that are known only after the first step.

        Returns:
            Start-up metrics.
        """
        return {}

    def close(self) -> None:
        """Ends the backend's threads while the interpreter and the process group still exist."""


@dataclass(frozen=True)
class _CheckFigures(Figures):
    """The check at the start on one worker."""

    seconds: torch.Tensor
    found: torch.Tensor
    """Of each kind of `Allow`, whether it was found: 1 or 0."""


class OrtRun(BackendRun):
    """ONNX Runtime."""

    def __init__(
        self, engine: Engine, cfg: OrtConfig, workers: Workers, run_dir: Path, journal: Journal | None, *, blocks: bool
    ) -> None:
        """
        Args:
            engine: the wrapped model.
            cfg: the backend's configuration.
            workers: this worker's place.
            run_dir: the run's folder.
            journal: the run's journal on the first worker, None on the others.
            blocks: whether each block of the model is an ORTModule of its own (ZeRO 3).
        """
        from ortlaunch.ort.verify.blocks import Rechecks
        from ortlaunch.ort.verify.evaluation_state import EvaluationState
        from ortlaunch.ort.verify.mode_changes import ModeChanges
        from ortlaunch.ort.verify.start import FRESH_BATCHES

        self.check_batches = FRESH_BATCHES
        self._engine = engine
        self._cfg = cfg
        self._workers = workers
        self._run_dir = run_dir
        self._journal = journal
        self._blocks = blocks
        self._task: Task | None = None
        self._batch_before: Batch | None = None
        self._evaluated = Evaluated()
        self._evaluated_before = 0
        """Evaluated batches up to the last batch that was trained on."""
        self._evaluations = 0
        self._evaluation_state = EvaluationState()
        self._mode_changes = ModeChanges()
        self._block_rechecks = Rechecks(after_evaluations=cfg.recheck_every != 0)
        self._sizes: set[Sizes] = set()
        self._fitting: Fitting | None = None
        """None with a graph for each block, where there is no whole model to compare."""

    def check(self, task: Task, batches: list[Batch]) -> dict[str, float]:
        from ortlaunch.ort import session
        from ortlaunch.ort.tracing import decisions
        from ortlaunch.ort.verify.blocks import block_findings
        from ortlaunch.ort.verify.fitting import Fitting

        begin = time.perf_counter()
        self._task = task
        self._sizes.update(map(sizes_of, batches))
        here = [self._given(batch) for batch in batches]
        model, precision = self._engine.inner, self._engine.precision_context
        if self._blocks:
            found = block_findings(model, task, precision, here, self._cfg.allow, self._block_rechecks)
        else:
            self._fitting = Fitting(model, task, precision)
            # In a script, another model's check may have ended.
            with decisions.as_at_start():
                found = self._fitting.findings(here, may_add=self._compares_sizes)
        for finding in found:
            if finding.kind not in self._cfg.allow:
                raise FindingError(finding.refusal())
        if Allow["frozen_branch"] not in self._cfg.allow:
            decisions.enforce()
        if not self._blocks:
            self._mode_changes.note(session.plain_model(model))
        # Without the export, which the first step would have made.
        seconds = time.perf_counter() - begin - (session.export_seconds(self._engine.inner) or 0.0)
        kinds = {finding.kind for finding in found}
        found_here = [float(kind in kinds) for kind in Allow]
        everyone = _CheckFigures.gathered(self._workers, seconds=seconds, found=found_here)
        allowed = [kind.value for kind, seen in zip(Allow, everyone.found.amax(dim=0).tolist(), strict=True) if seen]
        if self._journal is not None and allowed:
            self._journal.tags({"ortlaunch.allowed": ",".join(allowed)})
        return {"startup/ort_check_seconds": float(everyone.seconds.max())}

    def micro_batch_begins(self, step: int, index: int, batch: Batch) -> bool:
        """Has a batch of new sizes computed by a graph that is right for them, and compares the gradients with those of
        PyTorch again where that is due, while no gradients of the run are in memory.

        Raises:
            RequestError: a size now decides otherwise, and no graph of its own is right.
            WrongGradientsError: the backend computes something else.
        """
        has_compared = self._fit(batch)
        return (index == 0 and self._recheck(step, batch)) or has_compared

    def _recheck(self, step: int, batch: Batch) -> bool:
        if not _is_due(step, self._cfg.recheck_every) or not self.is_active:
            return False
        if self._blocks:
            # The parameters of a block exist only while it runs: the step's first forward compares them.
            self._block_rechecks.asked += 1
            return Allow["wrong_gradients"] not in self._cfg.allow
        self.compare(step, batch)
        return True

    def compare(self, step: int, batch: Batch) -> None:
        """Compares the gradients of a batch with those of PyTorch.

        Raises:
            WrongGradientsError: the backend computes something else.
        """
        error = self._gradient_error(batch)
        if error is not None and Allow["wrong_gradients"] not in self._cfg.allow:
            raise WrongGradientsError(
                f"step {step}: {error}. The weights are those before this step. Resume from the last checkpoint with "
                "backend=eager, or accept the difference with backend.allow=[wrong_gradients]"
            )

    def micro_batch_ends(self, batch: Batch) -> bool:
        """Compares gradients where a value that the graph has frozen is new.

        Raises:
            RequestError: the value now decides otherwise.
        """
        from ortlaunch.ort.tracing import decisions

        # On a GPU, a step's values are read when the next one has begun.
        read, self._batch_before = (self._batch_before if self._workers.device.type == "cuda" else batch), batch
        unverified, before = decisions.take_unverified()
        if not unverified or read is None:
            return self._check_after_evaluation(batch)
        self._verify(unverified, read, before)
        return True

    def _check_after_evaluation(self, batch: Batch) -> bool:
        """Compares the gradients of the batch after the first, second, fourth evaluation and so on.

        The check at the start trains only, and does not see what evaluation mode changes and training reads. After
        another evaluation they are compared if a `train()` of the model's own has changed what forward reaches.
        """
        from ortlaunch.ort import session

        if self._evaluated.count == self._evaluated_before:
            return False
        self._evaluated_before = self._evaluated.count
        self._evaluations += 1
        is_due = is_power_of_two(self._evaluations)
        if self._cfg.recheck_every == 0 or Allow["wrong_gradients"] in self._cfg.allow or not self.is_active:
            return False
        if self._blocks:
            # Their forwards have compared them.
            return is_due
        model = session.plain_model(self._engine.inner)
        if not is_due and not self._mode_changes.found(model):
            return False
        error = self._gradient_error(batch) or self._read_from_evaluation(batch)
        if error is not None:
            raise WrongGradientsError(
                f"after an evaluation, {error}: in evaluation mode, forward changes a buffer that is not saved or a "
                "value of Python, and in training mode it reads it; or the model's own train() changes what forward "
                "goes by. Save the buffer (persistent=True), use backend=eager or compile, or accept the difference "
                "with backend.allow=[wrong_gradients]"
            )
        self._mode_changes.note(model)
        return True

    def _read_from_evaluation(self, batch: Batch) -> str | None:
        """Says which values that evaluation has changed the loss of a batch depends on; None if there are none."""
        from ortlaunch.ort import session

        if self._task is None:
            return None
        model, precision = session.plain_model(self._engine.inner), self._engine.precision_context
        names = self._evaluation_state.read_in_training(model, self._task, precision, self._given(batch))
        return f"ONNX Runtime's graph does not change {names} as PyTorch does" if names else None

    def _fit(self, batch: Batch) -> bool:
        from ortlaunch.ort.verify.fitting import shapes

        if self._fitting is None:
            return False
        self._fitting.use(batch)
        if not self._compares_sizes or not is_new(sizes_of(batch), self._sizes) or not self.is_active:
            return False
        refused, error = None, None
        try:
            error = self._gradient_error(batch)
        except RequestError as refusal:
            # A value that goes by the size, and that Python reads.
            refused = refusal
        if (error is None and refused is None) or self._fitting.add([self._given(batch)]):
            return True
        raise refused or RequestError(
            f"with this batch ({shapes(batch)}), whose sizes are new, {error}: forward goes by a size, and ONNX "
            "Runtime's graph does what it did for the size of the trace. Use no loop or branch over sizes, give all "
            "batches the same sizes, use backend=eager or backend=compile, or accept it with "
            "backend.allow=[frozen_branch]"
        )

    @property
    def _compares_sizes(self) -> bool:
        """Whether batches of new sizes are compared; what a run accepts would be found there again."""
        return not set(self._cfg.allow) - {Allow["stale_buffers"]}

    def _verify(
        self, unverified: list[tuple[Decision, torch.Tensor]], batch: Batch, before: dict[str, torch.Tensor]
    ) -> None:
        """Compares a batch with values in Python that no comparison stands for yet, from the buffers of before it."""
        from ortlaunch.ort import session
        from ortlaunch.ort.tracing import buffers

        decision, value = unverified[0]
        # With a graph for each block, there is no whole model to compare.
        error: str | None = ""
        if not self._blocks:
            with buffers.set_back(session.plain_model(self._engine.inner), before):
                error = self._gradient_error(batch)
        if error is not None:
            raise RequestError(decision.change(value) + (f". With this batch, {error}" if error else ""))

    def evaluates(self, batch: Batch) -> None:
        """Has the batch computed by a graph that is right for its sizes, where there can be one."""
        if self._fitting is not None and self._compares_sizes and self.is_active:
            self._fitting.fit_evaluated(self._given(batch))

    def evaluated(self, batch: Batch) -> None:
        """Compares the loss of a batch with PyTorch's: of the first, second, fourth, eighth batch that was evaluated
        and so on, of those with new sizes, and where a value that the graph has frozen differs.

        Raises:
            RequestError: PyTorch's loss is another one.
        """
        from ortlaunch.ort import session
        from ortlaunch.ort.tracing import decisions
        from ortlaunch.ort.verify.start import evaluation_error

        is_due = self._evaluated.is_due(batch)
        is_first = self._evaluated.count == self._evaluated_before + 1
        unverified = decisions.take_unverified_in_evaluation()
        if self._task is None:
            return
        if self._blocks:
            # With a graph for each block, there is no whole model to compare.
            error = "" if unverified else None
        else:
            model, precision = self._engine.inner, self._engine.precision_context
            plain = session.plain_model(model)
            if not unverified and not (self.is_active and (is_due or (is_first and self._mode_changes.found(plain)))):
                return
            with self._evaluation_state.watched(plain):
                error = evaluation_error(model, self._task, precision, self._given(batch))
            self._mode_changes.note(plain)
        decisions.take_unverified_in_evaluation()  # The comparison has computed the same values again.
        if error is not None and unverified:
            decision, value = unverified[0]
            raise RequestError(
                f"in the evaluation, {decision.change(value)}" + (f". With it, {error}" if error else "")
            )
        if error is not None and Allow["wrong_outputs"] not in self._cfg.allow:
            raise RequestError(
                f"in evaluation mode {error}: forward there uses a value of Python that changes, a buffer that "
                "training replaces by another tensor, or an operator that ONNX Runtime computes otherwise. Change "
                "buffers in place (self.x.copy_(...)), use backend=eager or backend=compile, or accept the "
                "difference with backend.allow=[wrong_outputs]"
            )
        for decision, value in unverified:
            decision.verified.append(value)

    def evaluated_in_torch(self, batch: Batch) -> None:
        """Counts a batch that PyTorch has evaluated: see `_check_after_evaluation`."""
        self._evaluated.is_due(batch)

    def _gradient_error(self, batch: Batch) -> str | None:
        from ortlaunch.ort.verify.start import gradient_error

        if self._task is None:
            return None
        return gradient_error(
            self._engine.inner,
            self._task,
            self._engine.precision_context,
            self._given(batch),
            with_buffers=Allow["stale_buffers"] not in self._cfg.allow,
        )

    def _given(self, batch: Batch) -> Batch:
        """A batch as the model gets it: on its device, and in the dtypes of the engine."""
        return self._engine.model_inputs(moved(batch, self._workers.device))

    @property
    def is_active(self) -> bool:
        from ortlaunch.ort import session

        return session.is_active(self._engine.inner)

    def first_step_done(self) -> dict[str, float]:
        from ortlaunch.ort import session

        if self._journal is not None:
            # Times to the first step are comparable only between runs that both exported or both did not.
            origins = session.export_origins(self._engine.inner)
            self._journal.tags({"ortlaunch.export_cache": next(iter(origins), "off")})
            if not self.is_active:
                self._warn_of_fallback(session.fallback_reason(self._engine.inner) or "unknown reason")
            if self._cfg.debug.save_onnx:
                self._journal.artifact(Run(self._run_dir).onnx)
        seconds = session.export_seconds(self._engine.inner)
        return {} if seconds is None else {"startup/ort_export_seconds": seconds}

    def close(self) -> None:
        from ortlaunch.ort import session

        if self._fitting is not None:
            self._fitting.close()
        session.close(self._engine.inner)

    def _warn_of_fallback(self, reason: str) -> None:
        """Warns that a run that asked for ONNX Runtime continues without it (``backend.fallback=warn``)."""
        assert self._journal is not None
        self._journal.tags({"ortlaunch.fallback_reason": reason})
        print(f"warning: ONNX Runtime is NOT active, plain PyTorch runs instead (backend.fallback=warn): {reason}")


def _is_due(step: int, every: int | None) -> bool:
    """Whether a step compares the gradients: see ``backend.recheck_every``."""
    if every is not None:
        return every > 0 and step % every == 0
    times, rest = divmod(step, FIRST_RECHECK)
    return rest == 0 and is_power_of_two(times)


def backend_run(engine: Engine, config: Config, workers: Workers, run_dir: Path, journal: Journal | None) -> BackendRun:
    """The `BackendRun` of the configured backend; arguments as for `OrtRun`."""
    if not isinstance(config.backend, OrtConfig):
        return BackendRun()
    blocks = trainer_of(config.trainer).zero_stage(config.trainer) == 3
    return OrtRun(engine, config.backend, workers, run_dir, journal, blocks=blocks)
