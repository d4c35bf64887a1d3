"""A step that the user wrote: from model and batch to a loss, or to a loss and named values."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.base.targets import load_target
from ortlaunch.data.reading import check_state
from ortlaunch.models.task import Batch, Result, Task, make_task, scalar

PREDS, TARGET = "preds", "target"
"""torchmetrics' words for what metrics are computed from."""


@dataclass(frozen=True)
class OwnStep(Task):
    """Calls the user's functions in place of the model."""

    by_name: tuple[str, ...] = ()
    training: Own | None = None
    """``train.step``; None calls the model with the batch, as `Task` does."""
    evaluation: Own | None = None
    """``eval.step``; None evaluates as in training."""

    def run(self, model: torch.nn.Module, batch: Batch) -> Result:
        return super().run(model, batch) if self.training is None else self.training.result(model, batch)

    def evaluate(self, model: torch.nn.Module, batch: Batch) -> Result:
        if self.evaluation is not None:
            return self.evaluation.result(model, batch)
        return super().evaluate(model, batch) if self.training is None else self.run(model, batch)

    def outputs(self, model: torch.nn.Module, batch: Batch) -> Any:
        """The step's loss, and what each of its calls of the model has returned; the step's state stays."""
        if self.training is None:
            return super().outputs(model, batch)
        returned: list[Any] = []
        with self.kept(), _noted(model, returned) as called:
            result = self.training.result(called, batch)
        return {"loss": result.loss, "outputs": returned}

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """As of `Task`; the step's state stays."""
        with self.kept():
            return self.run(model, batch).loss

    def state(self) -> dict[str, Any]:
        """The state of steps that are objects, by their key."""
        return {one.key: one.called.state_dict() for one in self._own() if hasattr(one.called, "state_dict")}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` returned."""
        for one in self._own():
            if one.key in state and hasattr(one.called, "load_state_dict"):
                one.called.load_state_dict(state[one.key])

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Within it, the model is called beside the training; the state of the step is as before at its end."""
        step = self.training
        if step is None or not hasattr(step.called, "state_dict"):
            yield
            return
        before = copy.deepcopy(step.called.state_dict())
        try:
            yield
        finally:
            self.load_state({step.key: before})

    def _own(self) -> list[Own]:
        return [one for one in (self.training, self.evaluation) if one is not None]


@dataclass(frozen=True)
class Own:
    """One function of the user."""

    key: str
    target: str
    called: Callable[[torch.nn.Module, Batch], Any]

    def result(self, model: torch.nn.Module, batch: Batch) -> Result:
        """Calls it.

        Raises:
            RequestError: it returned no loss of one number, or values that are no numbers.
        """
        found = self.called(model, batch)
        loss, values = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        if not isinstance(loss, torch.Tensor) or not isinstance(values, Mapping):
            raise RequestError(f"{self}: returned {_described(found)}: return a loss, or (loss, {{name: value}})")
        for name, value in values.items():
            if name not in (PREDS, TARGET) and not _is_number(value):
                raise RequestError(f"{self}: the value '{name}' is {_described(value)}: return numbers by name")
        numbers = {str(name): _detached(value) for name, value in values.items()}
        return Result(scalar(loss, f"the loss of {self}"), numbers)

    def __str__(self) -> str:
        return f"{self.key}={self.target}"


def load_own(key: str, target: str | None) -> Own | None:
    """Imports a step; a class is made once, without arguments.

    Raises:
        RequestError: there is no such module or name, or it takes no model and batch.
    """
    if target is None:
        return None
    found: Any = load_target(target, f"{key}={target}")
    called = found() if inspect.isclass(found) else found
    if not callable(called):
        raise RequestError(f"{key}={target}: a class needs the method __call__(model, batch)")
    try:
        inspect.signature(called).bind(None, None)
    except TypeError:
        raise RequestError(f"{key}={target}: it must take two arguments, model and batch") from None
    except ValueError:  # Some callables that are written in C have no signature.
        pass
    if hasattr(called, "state_dict"):
        check_state(called.state_dict(), f"{key}={target}")
    return Own(key, target, called)


def make_step(model: torch.nn.Module, batch: Batch, train: str | None, evaluation: str | None) -> Task:
    """How a model is called in a run, with the user's steps where there are some.

    Args:
        model: the plain model.
        batch: the first batch.
        train: the key ``train.step``.
        evaluation: the key ``eval.step``.

    Raises:
        RequestError: a step cannot be imported, or the model does not take the batch where none is named.
    """
    if train is None and evaluation is None:
        return make_task(model, batch)
    called = {} if train is not None else vars(make_task(model, batch))
    return OwnStep(**called, training=load_own("train.step", train), evaluation=load_own("eval.step", evaluation))


class Noted:
    """Stands for the graph of a model, which is no module itself, and notes what it returns."""

    def __init__(self, called: Any, returned: list[Any]) -> None:
        self._called, self._returned = called, returned

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self._called(*args, **kwargs)
        self._returned.append(found)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._called, name)


@contextlib.contextmanager
def _noted(model: Any, returned: list[Any]) -> Iterator[Any]:
    if not isinstance(model, torch.nn.Module):
        yield Noted(model, returned)
        return
    # A wrapper may have a method of this name that reaches the wrapped model.
    handle = torch.nn.Module.register_forward_hook(model, lambda _module, _inputs, found: returned.append(found))
    try:
        yield model
    finally:
        handle.remove()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _described(found: Any) -> str:
    if isinstance(found, torch.Tensor):
        return f"a tensor of shape {tuple(found.shape)}"
    if isinstance(found, tuple):
        return f"a tuple of {', '.join(type(one).__name__ for one in found) or 'nothing'}"
    return f"{found!r}" if isinstance(found, int | float | str | None) else f"a {type(found).__name__}"
