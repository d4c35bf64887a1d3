"""A script's own loop as a run: the parts of ortlaunch's loop, in the order in which the script calls them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.config.devices import resolve_device
from ortlaunch.config.schema import Config, Device, OrtConfig
from ortlaunch.data.reading import check_state
from ortlaunch.models.checks import check_model, check_precision
from ortlaunch.models.strides import close_gaps
from ortlaunch.models.task import Result, Task, with_gradient
from ortlaunch.trainer.backend_run import BackendRun, OrtRun, backend_run
from ortlaunch.trainer.buffers import plain_buffers, take_first_workers
from ortlaunch.trainer.checkpoint import resume, rng
from ortlaunch.trainer.checkpoint.host import to_host
from ortlaunch.trainer.checkpoint.own_buffers import OwnBuffers
from ortlaunch.trainer.checkpoint.saver import ENGINE
from ortlaunch.trainer.engine import Engine
from ortlaunch.trainer.engines.several import Several
from ortlaunch.trainer.feed import Feed, Micro
from ortlaunch.trainer.mean import Mean
from ortlaunch.trainer.run import journal_start, make_recorder
from ortlaunch.trainer.script_loader import ScriptLoader
from ortlaunch.trainer.session import SCRIPT, Session
from ortlaunch.trainer.workers import values_of_all
from ortlaunch.trainer.wrapping import wrap

if TYPE_CHECKING:
    from ortlaunch.trainer.script_calls import ScriptCalls


class AttachedModel(torch.nn.Module):
    """A wrapped model, as a script calls it. `ortlaunch.unwrapped` gives the script's own again.

    In training it calls the trainer's module, in the precision of the run. In evaluation mode, or without gradients, it
    calls what the trainer evaluates, which does not wait for other workers where the model is whole on each.
    """

    def __init__(self, engine: Engine, backend: BackendRun) -> None:
        super().__init__()
        self.module = engine.module
        self._engine = [engine]  # In a list, so that it is no part of the module.
        self.calls = _calls(engine, backend)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model."""
        (engine,) = self._engine
        trains = self.training and torch.is_grad_enabled()
        args, kwargs = engine.model_inputs(args), engine.model_inputs(kwargs)
        with engine.precision_context():
            if self.calls is not None:
                return (self.calls.trained if trains else self.calls.evaluated)(args, kwargs)
            return (engine.module if trains else engine.evaluated)(*args, **kwargs)


class AttachedOptimizer(torch.optim.Optimizer):
    """A script's optimizer, whose step is that of the run: it leaves out gradients that are not finite."""

    def __init__(self, inner: torch.optim.Optimizer, wrapped: Wrapped, run: Attached) -> None:
        # It has no groups and no state of its own.
        self._inner, self._wrapped, self._run = inner, wrapped, run

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    def __repr__(self) -> str:
        return repr(self._inner)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates the weights, where a step's last micro-batch has been trained on."""
        if closure is not None:
            raise RequestError("optimizer.step(closure): an optimizer that computes the loss again cannot be wrapped")
        self._run._take_step(self._wrapped)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients, but not those that a step is still to take."""
        self._run._drop_gradients(self._wrapped, self._inner)

    def state_dict(self) -> dict[str, Any]:
        """The state of the script's optimizer."""
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state into the script's optimizer."""
        self._inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses further weights, of which the trainer does not know."""
        raise RequestError("optimizer.add_param_group: give all weights before run.wrap")


@dataclass
class Wrapped:
    """One model that a script trains."""

    model: AttachedModel
    engine: Engine
    plain: torch.nn.Module
    shapes: dict[str, list[int]]
    backend: BackendRun
    has_gradients: bool = False
    """Whether there are gradients that no step has taken."""


@dataclass(frozen=True)
class _Built:
    """What a script trains, as a session sees it."""

    loader: ScriptLoader
    buffers: OwnBuffers
    shapes: dict[str, list[int]]
    base: str
    reading: dict[str, Any]
    backend: BackendRun
    startup: dict[str, float]


class Attached:
    """A script's run, on one worker. All workers make the same calls in the same order.

    Attributes:
        device: where models and batches are.
        rank: this worker's number.
        world_size: how many workers there are.
        folder: the run folder.
        restored: what `save` got of the script's own at the checkpoint from which the run goes on; empty at first.
    """

    def __init__(
        self,
        session: Session,
        startup: dict[str, float],
        described: Callable[[dict[str, float]], str] | None = None,
    ) -> None:
        """
        Args:
            session: this worker's run, which has found its checkpoint.
            startup: start-up times so far, by metric name.
            described: the figures of a log step in words, where this worker prints them.
        """
        self._session = session
        self._startup = startup
        self._described = described
        self._wrapped: list[Wrapped] = []
        self._engine: Engine | None = None
        self._micro: Micro | None = None
        self._accumulates = False
        self._own_checked = False
        self._loss = torch.zeros((), device=session.workers.device)
        self.device: torch.device = session.workers.device
        self.rank: int = session.workers.rank
        self.world_size: int = session.workers.world_size
        self.folder: Path = session.run.path
        self.restored: Mapping[str, Any] = session.start.own.get(SCRIPT, {})

    @property
    def should_stop(self) -> bool:
        """Whether all workers have agreed to stop after the present step."""
        return self._session.stopped_at is not None

    @overload
    def wrap(self, model: torch.nn.Module, optimizer: None = None) -> torch.nn.Module: ...

    @overload
    def wrap(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[AttachedModel, AttachedOptimizer]: ...

    def wrap(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Puts backend and trainer around a model, and loads both from the checkpoint where the run goes on.

        Args:
            model: a plain model.
            optimizer: an optimizer over its parameters; None for a model that is not trained, which stays in PyTorch.

        Returns:
            The model and the optimizer to use from now on; without an optimizer, the model on its device alone.

        Raises:
            RequestError: the model or the optimizer cannot be used, or is not that of the checkpoint.
        """
        session, config = self._session, self._session.config
        if self._engine is not None:
            raise RequestError("run.wrap: wrap all models before run.steps")
        check_model_of_script(model, is_trained=optimizer is not None)
        if optimizer is None:
            return model.to(self.device)
        if self._wrapped:
            _check_several(self._wrapped[0].engine, config)
        check_precision(model)
        close_gaps(model)
        number, shapes = len(self._wrapped), resume.shapes_of(model)
        self._check_checkpoint(number, shapes)
        engine = wrap(model, config, session.workers, Task(()), session.run.path, optimizer)
        if session.start.path is not None:
            folder = session.start.path / ENGINE
            own = folder / str(number)
            engine.restore(own if own.is_dir() else folder, session.start.workers, session.run.scratch, session.control)
        backend = backend_run(engine, config, session.workers, session.run.path, session.journal)
        wrapped = Wrapped(AttachedModel(engine, backend), engine, model, shapes, backend)
        self._wrapped.append(wrapped)
        return wrapped.model, AttachedOptimizer(optimizer, wrapped, self)

    @overload
    def steps(self, loader: None = None) -> Iterator[int]: ...

    @overload
    def steps(self, loader: Iterable[Any]) -> Iterator[tuple[int, Any]]: ...

    def steps(self, loader: Iterable[Any] | None = None) -> Iterator[Any]:
        """The steps that are left, counted from 1, to ``train.steps`` or until all workers stop.

        A step of several micro-batches (``train.grad_accumulation``) comes as often. What the script does not call in a
        step, such as `save`, is done at its end.

        Args:
            loader: this worker's batches, gone over again and again; None for a script that makes its own.

        Yields:
            The step's number, with a loader also the batch, on the device.
        """
        engine = self._begin(loader)
        session = self._session
        try:
            for step in session.steps():
                self._open(step)
                for micro in session.micro_batches():
                    with engine.exchange(last=micro.last):
                        self._micro = micro
                        yield step if loader is None else (step, micro.batch)
                self._close(step)
            self._end()
        finally:
            self._micro = None
            session.watch.stop()

    def backward(self, loss: torch.Tensor, of: torch.nn.Module | None = None) -> None:
        """Computes the gradients of a loss.

        Args:
            loss: one number. With ``train.grad_accumulation`` it is divided by the number of micro-batches.
            of: the wrapped model that it trains, where there are several.
        """
        micro, wrapped = self._present("run.backward"), self._of(of)
        engine = wrapped.engine
        loss = with_gradient(loss)
        engine.forward_done()
        engine.backward(loss, last=micro.last and not self._accumulates)
        wrapped.has_gradients = True
        self._loss = self._loss + loss.detach()

    @contextlib.contextmanager
    def accumulating(self, model: torch.nn.Module | None = None) -> Iterator[None]:
        """Within it, forward and backward only add to the gradients; workers exchange them in a later backward.

        Args:
            model: the wrapped model, where there are several.
        """
        self._present("run.accumulating")
        engine = self._of(model).engine
        if engine.counts_micro_batches:
            raise RequestError("run.accumulating: DeepSpeed counts micro-batches itself: use train.grad_accumulation")
        self._accumulates = True
        try:
            with engine.exchange(last=False):
                yield
        finally:
            self._accumulates = False
            with engine.exchange(last=True):
                pass

    def log(self, step: int, loss: torch.Tensor | float | None = None, **values: torch.Tensor | float) -> None:
        """Logs a step's numbers, means over micro-batches and workers, as ``train/NAME``. Only log steps read them.

        Args:
            step: the present step.
            loss: the step's loss; None takes what `backward` got.
            values: further numbers by name.
        """
        micro = self._present("run.log")
        if self._is_logged:
            raise RequestError(f"run.log: step {step} is logged already: give all its values in one call")
        shown = self._loss if loss is None else loss
        self._loss = torch.zeros((), device=self.device)
        self._mean.add(Result(_detached(shown), {name: _detached(value) for name, value in values.items()}))
        if micro.last:
            self._log(step)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint follows a step; all workers ask, and agree here on a request to stop.

        Args:
            step: the present step.
        """
        if not self._present("run.saves").last:
            return False
        self._done(step)
        self._has_asked = True
        self._is_saved = not self._session.saves(step)
        return not self._is_saved

    def save(self, step: int, **own: Any) -> None:
        """Saves models, optimizers, the loader's position and the generators, while the training goes on.

        Args:
            step: the present step, for which `saves` is true.
            own: what the script keeps on this worker, as numbers, texts, lists, dicts and tensors; see `restored`.
        """
        self._present("run.save")
        kept = to_host(own)
        if own and not self._own_checked:
            check_state(kept, "run.save")
            self._own_checked = True
        self._is_saved = True
        self._session.save(step, kept)

    def _begin(self, loader: Iterable[Any] | None) -> Engine:
        session, workers = self._session, self._session.workers
        if not self._wrapped:
            raise RequestError("run.steps: no model is wrapped: model, optimizer = run.wrap(model, optimizer)")
        if self._engine is not None:
            raise RequestError("run.steps is called a second time: a script has one loop over steps")
        engines = [one.engine for one in self._wrapped]
        self._engine = session.engine = engines[0] if len(engines) == 1 else Several(engines)
        start = session.start
        data = ScriptLoader(loader, start.position)
        resume.check_data(start, data.fingerprint, data.samples, workers, data.reading)
        if loader is not None and start.path is None and workers.world_size > 1:
            _check_shares(data, session)
        shapes = self._named_apart({number: one.shapes for number, one in enumerate(self._wrapped)})
        model = self._together()
        buffers = OwnBuffers(model, shapes)
        if start.path is not None:
            self._check_number()
            buffers.load(start.buffers)
            if start.workers != workers.world_size > 1:
                take_first_workers(plain_buffers(model).values())
        backend = self._wrapped[0].backend
        startup = {**self._startup, "startup/build_seconds": time.perf_counter() - session.entered}
        built = _Built(data, buffers, shapes, "", data.reading, backend, startup)
        recorder = make_recorder(
            session,
            is_ort_active=lambda: all(one.backend.is_active for one in self._wrapped),
            flops_per_sample=None,
            has_values=True,
        )
        resume.leave_behind(start, workers, session.control)
        if session.journal is not None:
            journal_start(session, "script", data.fingerprint, "the script's own data", session.journal)
        session.begin(built, Feed(data, workers.device), recorder)
        for engine in engines:
            engine.forward_done = recorder.own_time.end
        if "rng" in start.own:
            rng.restore(start.own["rng"])
        return self._engine

    def _open(self, step: int) -> None:
        self._mean = Mean(self._session.config.train.grad_accumulation, self.device)
        self._loss = torch.zeros((), device=self.device)
        self._grad_norm: torch.Tensor | float | None = None
        assert self._engine is not None
        self._lr = self._engine.lr
        self._is_done = self._is_logged = self._has_asked = self._is_saved = False
        for one in self._wrapped:
            if one.model.calls is not None:
                one.model.calls.begin(step)

    def _done(self, step: int) -> None:
        """The weights of a step are there."""
        if not self._is_done:
            self._is_done = True
            self._session.step_done(step)

    def _log(self, step: int) -> None:
        self._done(step)
        self._is_logged = True
        if self._session.is_logged(step):
            self._session.log(step, self._mean, self._grad_norm, self._lr)
            if self._described is not None:
                print(f"step {step}  {self._described(self._session.logged)}", flush=True)

    def _close(self, step: int) -> None:
        """Does what the script has not done in a step."""
        if not self._is_logged:
            self._mean.add(Result(self._loss))
            self._log(step)
        if not self._has_asked:
            self.saves(step)
        if not self._is_saved:
            self.save(step)

    def _end(self) -> None:
        """After the last step: waits for the checkpoint, and notes that the run is done or where it stopped."""
        session = self._session
        session.finish()
        for one in self._wrapped:
            one.backend.close()
        if session.workers.is_first and session.stopped_at is None:
            session.run.note_done(session.last_step)
        elif session.journal is not None and session.stopped_at is not None:
            session.note_stopped(session.run.stop_word() or "signal")

    def _take_step(self, wrapped: Wrapped) -> None:
        if self._present("optimizer.step").last and not self._accumulates:
            self._grad_norm = wrapped.engine.step()
            wrapped.has_gradients = False

    def _drop_gradients(self, wrapped: Wrapped, optimizer: torch.optim.Optimizer) -> None:
        if self._session.config.train.grad_accumulation > 1 and wrapped.has_gradients:
            return  # They belong to the step.
        if wrapped.engine.counts_micro_batches:
            if wrapped.has_gradients:
                raise RequestError("optimizer.zero_grad: DeepSpeed drops no gradients before the step that takes them")
            return
        optimizer.zero_grad(set_to_none=True)
        wrapped.has_gradients = False

    def _of(self, model: torch.nn.Module | None) -> Wrapped:
        found = [one for one in self._wrapped if model is None or one.model is model or one.plain is model]
        if len(found) != 1:
            what = "several models are wrapped" if model is None else "this model is not wrapped"
            raise RequestError(f"run: {what}: name the wrapped model that is meant, as in run.backward(loss, of=model)")
        return found[0]

    def _present(self, call: str) -> Micro:
        if self._micro is None:
            raise RequestError(f"{call}: call it within the loop over run.steps")
        return self._micro

    def _together(self) -> torch.nn.Module:
        if len(self._wrapped) == 1:
            return self._wrapped[0].plain
        return torch.nn.ModuleList([one.plain for one in self._wrapped])

    def _named_apart(self, shapes: Mapping[int, dict[str, list[int]]]) -> dict[str, list[int]]:
        if len(shapes) == 1:
            return shapes[0]
        return {f"{number}.{name}": shape for number, own in shapes.items() for name, shape in own.items()}

    def _check_checkpoint(self, number: int, shapes: dict[str, list[int]]) -> None:
        """Refuses a checkpoint of another model; `_check_number` sees to the number of models."""
        start = self._session.start
        if start.path is None:
            return
        stored: dict[str, list[int]] = start.meta["shapes"]
        if (start.path / ENGINE / "0").is_dir():
            prefix = f"{number}."
            stored = {name.removeprefix(prefix): one for name, one in stored.items() if name.startswith(prefix)}
        if lines := resume.differences(stored, shapes):
            raise RequestError(f"{start.path} is of another model:\n" + "\n".join(lines))

    def _check_number(self) -> None:
        start = self._session.start
        assert start.path is not None
        then = max(1, sum(one.name.isdecimal() for one in (start.path / ENGINE).iterdir()))
        if then != len(self._wrapped):
            raise RequestError(f"{start.path} is of {then} models, and the script has wrapped {len(self._wrapped)}")


def _calls(engine: Engine, backend: BackendRun) -> ScriptCalls | None:
    """What compares a model's calls with PyTorch, where ONNX Runtime computes them."""
    if not isinstance(backend, OrtRun):
        return None
    # Imports ONNX Runtime, which need not be installed.
    from ortlaunch.trainer.script_calls import ScriptCalls

    return ScriptCalls(engine, backend)


def check_model_of_script(model: torch.nn.Module, *, is_trained: bool) -> None:
    """Refuses what a backend and a trainer cannot wrap, or what several workers cannot call."""
    if is_trained:
        check_model(model)
    elif any(isinstance(one, torch.nn.DataParallel) for one in model.modules()):
        raise RequestError("run.wrap: the model is in DataParallel: give the plain module")


def _check_several(engine: Engine, config: Config) -> None:
    """Refuses what does not go with several models.

    Args:
        engine: that of the first one.
        config: the run's configuration.

    Raises:
        RequestError: with what to do.
    """
    if engine.counts_micro_batches:
        raise RequestError(
            "run.wrap: trainer=deepspeed trains one model: use trainer=ddp or fsdp, or put the models into one module"
        )
    if isinstance(config.backend, OrtConfig) and resolve_device(config.device) is Device.cuda:
        raise RequestError(
            "run.wrap: backend=ort on a GPU reads what a graph has frozen a step later, and would not know of which of "
            "several models it is: use backend=eager, or device=cpu"
        )
    if config.train.grad_accumulation > 1:
        raise RequestError(
            "run.wrap: train.grad_accumulation does not know which of several models a micro-batch trains: leave it "
            "out, and accumulate by run.accumulating(model)"
        )


def _check_shares(data: ScriptLoader, session: Session) -> None:
    """Refuses a loader from which all workers read the same. All workers call it."""
    everyone = values_of_all(data.first_digest(), session.control)
    if everyone[0] and all(one == everyone[0] for one in everyone):
        raise RequestError(
            "run.steps: all workers read the same batch first, so each sample would be trained on several times: give "
            "the DataLoader sampler=DistributedSampler(dataset, run.world_size, run.rank)"
        )


def _detached(value: torch.Tensor | float) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
