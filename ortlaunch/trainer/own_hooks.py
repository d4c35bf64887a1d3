"""Hooks that the user wrote: objects whose methods are called with the run."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from ortlaunch.base.errors import RequestError, TrainingError
from ortlaunch.base.own_code import place_of
from ortlaunch.base.targets import check_arguments, load_target, with_arguments
from ortlaunch.data.batch import Batch
from ortlaunch.data.reading import check_state
from ortlaunch.models.unwrapped import unwrapped
from ortlaunch.trainer.hooks import Hook
from ortlaunch.trainer.session import Session

_METHODS = ("start", "step", "evaluation", "checkpoint", "end")


class HookedRun:
    """What a hook sees of its run.

    Attributes:
        folder: the run folder.
        rank: this worker's number.
    """

    def __init__(self, session: Session, where: str, *, everywhere: bool) -> None:
        self._session = session
        self._where = where
        self._everywhere = everywhere
        self.folder: Path = session.run.path
        self.rank: int = session.workers.rank

    @property
    def step(self) -> int:
        """The step that has ended last, counted from 1."""
        return self._session.step

    @property
    def model(self) -> torch.nn.Module:
        """The wrapped model; `ortlaunch.unwrapped` gives its plain one."""
        return self._session.engine.module

    @property
    def batch(self) -> Batch:
        """The micro-batch that this worker has trained on last, on the device."""
        return self._session.batch

    @property
    def values(self) -> Mapping[str, float]:
        """The figures that were logged last, by their names: train/loss, eval/loss and the like."""
        return dict(self._session.logged)

    def log_metric(self, name: str, value: float) -> None:
        """Logs a number at this step, beside the run's own; that of the first worker counts."""
        if self._session.journal is not None:
            self._session.journal.metrics(self.step, {name: float(value)})

    def log_text(self, text: str, name: str) -> None:
        """Keeps a text as a file of this name, such as samples/step-100.txt, in the run folder and the tracker."""
        self._keep(name, lambda path: path.write_text(text))

    def log_image(self, image: Any, name: str) -> None:
        """Keeps a picture as a PNG file of this name, in the run folder and the tracker.

        Args:
            image: of Pillow, an array (height, width, channels) or a tensor (channels, height, width); numbers with a
                point are between 0 and 1.
            name: ends in .png.
        """
        self._keep(name, lambda path: _picture(image).save(path))

    def freeze(self, match: str) -> None:
        """Keeps the weights whose names match, such as ``layers.0.*``, as they are from the next step on.

        Their gradients are still computed, so that any worker may train them again. A resumed run freezes nothing by
        itself: call it in `start` again.

        Raises:
            RequestError: nothing matches, the hook is not everywhere, or DeepSpeed updates the weights.
        """
        self._hold(self._session.engine.held | self._matching(match))

    def unfreeze(self, match: str) -> None:
        """Trains the weights whose names match from the next step on, whoever froze them; errors are as of `freeze`."""
        self._hold(self._session.engine.held - self._matching(match))

    def _hold(self, frozen: frozenset[torch.nn.Parameter]) -> None:
        if not self._everywhere and self._session.workers.world_size > 1:
            raise RequestError(
                f"{self._where}: write everywhere = True into it: all workers must freeze the same weights"
            )
        self._session.engine.hold(frozen, self._where)

    def _matching(self, match: str) -> set[torch.nn.Parameter]:
        named = dict(unwrapped(self.model).named_parameters(remove_duplicate=False))
        found = {named[name] for name in fnmatch.filter(named, match)}
        if not found:
            raise RequestError(
                f"{self._where}: no parameter's name matches {match}: the names are {', '.join(list(named)[:5])} …"
            )
        return found

    def stop(self) -> None:
        """Ends the run at one of the next steps, with a checkpoint from which it can be resumed."""
        self._session.ask_to_stop()

    def _keep(self, name: str, write: Any) -> None:
        journal = self._session.journal
        if journal is None:
            return
        place = PurePosixPath(name)
        if place.is_absolute() or ".." in place.parts or not place.name:
            raise RequestError(f"a hook logs the file {name!r}: name it by a path below the run's folder of files")
        path = self._session.run.logged / place
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
        journal.artifact(path, str(place.parent) if place.parent.parts else "")


class OwnHook(Hook):
    """Calls the methods that a user's hook has."""

    def __init__(self, hook: Any, where: str, session: Session) -> None:
        """
        Args:
            hook: the object.
            where: the key and its value.
            session: the run.
        """
        self._hook = hook
        self._where = where
        self._session = session
        self._run = HookedRun(session, where, everywhere=getattr(hook, "everywhere", False))

    def start(self) -> None:
        self._call("start")

    def step(self) -> None:
        self._call("step")

    def evaluation(self) -> None:
        self._call("evaluation")

    def checkpoint(self) -> None:
        self._call("checkpoint")

    def end(self) -> None:
        self._call("end")

    def _call(self, name: str) -> None:
        method = getattr(self._hook, name, None)
        if method is None:
            return
        try:
            method(self._run)
        except RequestError:
            raise
        except Exception as error:
            place = place_of(error) or self._where
            text = str(error).strip().partition("\n")[0]
            raise TrainingError(
                f"{self._where}: {name} failed at step {self._run.step} ({place}): {type(error).__name__}: {text}"
            ) from error
        # Its time belongs to no step.
        self._session.recorder.restart_clock()


def own_hooks(entries: list[Any], session: Session, stored: Mapping[str, Any]) -> tuple[list[OwnHook], dict[str, Any]]:
    """Makes this worker's hooks, in the state that the checkpoint has.

    Args:
        entries: ``train.hooks``.
        session: the run.
        stored: the state of each hook by its target, that of a second one by ``TARGET#2``; empty without a checkpoint.

    Returns:
        The hooks, and the objects by their targets, whose state goes into checkpoints.

    Raises:
        RequestError: there is no such class, or it has none of the methods.
    """
    hooks: list[OwnHook] = []
    objects: dict[str, Any] = {}
    times: Counter[str] = Counter()
    for entry in entries:
        target, arguments = with_arguments(entry, "train.hooks", "target")
        where = f"train.hooks={target}"
        found: Any = load_target(target, where)
        check_arguments(found, arguments, where, "train.hooks")
        if not (session.workers.is_first or getattr(found, "everywhere", False)):
            continue
        hook = found(**arguments)
        times[target] += 1
        place = target if times[target] == 1 else f"{target}#{times[target]}"
        if not any(callable(getattr(hook, name, None)) for name in _METHODS):
            raise RequestError(f"{where}: it has none of the methods {', '.join(_METHODS)}")
        if hasattr(hook, "state_dict"):
            check_state(hook.state_dict(), where)
        if place in stored and hasattr(hook, "load_state_dict"):
            hook.load_state_dict(stored[place])
        objects[place] = hook
        hooks.append(OwnHook(hook, where, session))
    return hooks, objects


def _picture(image: Any) -> Any:
    from PIL import Image

    if isinstance(image, Image.Image):
        return image
    if isinstance(image, torch.Tensor):
        image = image.detach().cpu().float() if image.is_floating_point() else image.detach().cpu()
        image = (image.permute(1, 2, 0) if image.ndim == 3 else image).numpy()
    if image.dtype.kind == "f":
        image = (image.clip(0.0, 1.0) * 255.0).round()
    image = image.astype("uint8")
    return Image.fromarray(image[..., 0] if image.ndim == 3 and image.shape[-1] == 1 else image)
