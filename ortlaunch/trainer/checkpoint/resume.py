"""Resumes a run: finds the checkpoint, checks that it fits this run, and reads each worker's part of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ortlaunch.base.errors import RequestError
from ortlaunch.base.ownership import require_own
from ortlaunch.base.text import counted
from ortlaunch.config.schema import Config
from ortlaunch.config.trainers import kind_in_words, trainer_of
from ortlaunch.data.position import Position
from ortlaunch.run import checkpoints as store
from ortlaunch.run import manifest
from ortlaunch.run.run import Run
from ortlaunch.trainer.checkpoint import reading
from ortlaunch.trainer.checkpoint.own_buffers import Saved
from ortlaunch.trainer.checkpoint.saver import BUFFERS, WORKERS
from ortlaunch.trainer.workers import Workers

_SHOWN = 5
_NEW_RUN = "start a new run from its weights, by ortlaunch export weights and model.weights"


@dataclass(frozen=True)
class Start:
    """Where training begins."""

    path: Path | None = None
    """The checkpoint; None if training starts from the beginning."""
    meta: dict[str, Any] = field(default_factory=dict)
    """The checkpoint's facts."""
    own: dict[str, Any] = field(default_factory=dict)
    """The state that the worker of this rank saved; empty if there was no such worker."""
    buffers: Saved = field(default_factory=dict)
    """The buffers that the engine's state lacks, as this worker takes them."""
    notes: list[str] = field(default_factory=list)
    """What the user should know of the choice, one line each."""
    abandoned: list[Path] = field(default_factory=list)
    """Checkpoints in the run folder that no longer belong to the run; see `leave_behind`."""

    @property
    def step(self) -> int:
        """The number of steps that are done."""
        return int(self.meta.get("step", 0))

    @property
    def tokens(self) -> int:
        """The number of tokens that all workers together have seen."""
        return int(self.meta.get("tokens", 0))

    @property
    def workers(self) -> int:
        """The number of workers that wrote the checkpoint."""
        return int(self.meta.get("workers", 0))

    @property
    def position(self) -> Position:
        """The position in the data from which this worker continues."""
        place = self.own.get("position", self.meta.get("position"))
        return Position(**place) if place else Position()


def find(config: Config, run_dir: Path, workers: Workers, group: dist.ProcessGroup, *, attempt: int) -> Start:
    """Finds the checkpoint to resume from. All workers must call it, and all get the same checkpoint.

    Args:
        config: the run's configuration.
        run_dir: the run folder.
        workers: this worker's place.
        group: a process group of all workers on the CPU.
        attempt: how often the workers were started before in this launch of the run.

    Raises:
        RequestError: ``train.resume`` names no complete checkpoint, or one that does not fit this run.
    """
    choice = _Choice()
    if workers.is_first:
        choice = _believed(_choose(config, run_dir, attempt), run_dir)
    choice = _from_first(choice, group)
    if choice.error:
        raise RequestError(choice.error)
    if choice.path is None:
        return Start(notes=choice.notes, abandoned=choice.abandoned)
    start = _read(choice.path, choice, workers)
    _check_run(config, start, workers)
    return start


def leave_behind(start: Start, workers: Workers, group: dist.ProcessGroup) -> None:
    """Renames the checkpoints that no longer belong to the run. All workers call it once nothing refuses the run.

    A refused run keeps its checkpoints, so that the next launch continues from the newest one.

    Args:
        start: the place where training begins.
        workers: this worker's place.
        group: a process group of all workers on the CPU.
    """
    if not start.abandoned:
        return
    dist.barrier(group)
    if workers.is_first:
        for path in start.abandoned:
            store.set_aside(path)


def check_model(start: Start, shapes: dict[str, list[int]]) -> None:
    """Refuses a checkpoint of another model.

    Args:
        start: the place where training begins.
        shapes: the shape of each parameter and buffer of the plain model, by name.

    Raises:
        RequestError: names or shapes differ. The message lists some of them.
    """
    if start.path is not None and (lines := differences(start.meta["shapes"], shapes)):
        raise RequestError(f"{start.path} is of another model:\n" + "\n".join(lines))


def check_base(start: Start, base: str) -> None:
    """Refuses a checkpoint of an adapter that was trained beside other weights.

    Args:
        start: the place where training begins.
        base: a hash of this run's weights that are not trained; empty where all are.

    Raises:
        RequestError: the checkpoint's hash differs.
    """
    if start.path is not None and start.meta.get("base", "") != base:
        raise RequestError(
            f"{start.path} holds an adapter alone, and the weights beside it were others when it was written: give the "
            "model, model.params, model.weights and seed of that run"
        )


def check_buffers(start: Start, shapes: dict[str, list[int]]) -> None:
    """Refuses a checkpoint of another model, by the buffers that are in no state dict.

    Args:
        start: the place where training begins.
        shapes: the shape of each of them in the plain model as it was built, by name.

    Raises:
        RequestError: names or shapes differ. The message lists some of them.
    """
    stored = {name: one["shape"] for name, one in start.buffers.items() if one["shape"] is not None}
    if lines := differences(stored, {name: shape for name, shape in shapes.items() if name in stored}):
        raise RequestError(f"{start.path} is of another model:\n" + "\n".join(lines))


def differences(stored: dict[str, list[int]], model: dict[str, list[int]]) -> list[str]:
    """The differences between the stored names and shapes and the model's, in a few lines; empty if there are none."""
    lines = _listed("the model has no", [name for name in stored if name not in model])
    lines += _listed("there is no", [name for name in model if name not in stored])
    other = [
        f"{name}: {tuple(stored[name])} there, {tuple(model[name])} in the model"
        for name in stored
        if name in model and list(stored[name]) != list(model[name])
    ]
    return lines + _listed("other shape:", other)


def shapes_of(model: torch.nn.Module) -> dict[str, list[int]]:
    """The shape of each parameter and buffer of a plain model, by name."""
    return {name: list(value.shape) for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def reading_of(config: Config, *, is_numbered: bool) -> dict[str, Any]:
    """The keys and values that determine the batches of a stream; empty for a data set.

    A position in a stream counts batches, so it is valid only with the same values. A position in a data set counts
    numbered samples.

    Args:
        config: the run's configuration.
        is_numbered: whether the workers share one order of samples, as in a data set.
    """
    if is_numbered:
        return {}
    of_data = ("seq_len", "workers", "eval_fraction", "eval_split")
    reading = {f"data.{name}": getattr(config.data, name) for name in of_data if hasattr(config.data, name)}
    return {"train.batch_size": config.train.batch_size, **reading}


def optimizer_of(config: Config) -> dict[str, Any]:
    """The keys and values that determine which state the optimizer has, and for which groups of parameters."""
    return config.optimizer.state_facts() | config.adapter.facts()


def check_data(start: Start, fingerprint: str, samples: int | None, workers: Workers, reading: dict[str, Any]) -> None:
    """Refuses to resume with other data than the checkpoint's, or with a stream that is read in another way.

    Args:
        start: the place where training begins.
        fingerprint: the fingerprint of this run's data.
        samples: the number of samples of this run's data; None for a stream.
        workers: this worker's place.
        reading: the result of `reading_of` for this run.

    Raises:
        RequestError: the data or its reading differs. The message says how.
    """
    if start.path is None:
        return
    for what, then, now in (
        ("data with the fingerprint", start.meta["data"], fingerprint),
        ("data of this many samples:", start.meta["samples"], samples),
    ):
        if then != now:
            raise RequestError(
                f"{start.path} was written while training on {what} {then}, and this run has {now}: give the same "
                f"data, or {_NEW_RUN}"
            )
    if reading and start.workers != workers.world_size:
        raise RequestError(
            f"{start.path} was written by {counted(start.workers, 'worker')}, each in its own part of a stream: "
            f"resume with as many (launcher.workers_per_node={start.workers}), or {_NEW_RUN}"
        )
    for key, now in reading.items():
        # Checkpoints of older versions do not have these values.
        then = start.meta.get("reading", {}).get(key, now)
        if then != now:
            raise RequestError(
                f"{start.path} counts the batches of a stream that was read with {key}={_word(then)}, and this run has "
                f"{key}={_word(now)}: use the same, or {_NEW_RUN}"
            )


def kind_of(config: Config) -> str:
    """The layout of the training state. Only a checkpoint of the same kind can be loaded."""
    return trainer_of(config.trainer).checkpoint_kind(config.trainer)


@dataclass(frozen=True)
class _Choice:
    """The first worker's choice of the checkpoint to resume from."""

    path: Path | None = None
    """The checkpoint; None if training starts from the beginning."""
    notes: list[str] = field(default_factory=list)
    """Why newer checkpoints were skipped, one line each."""
    abandoned: list[Path] = field(default_factory=list)
    """As `Start.abandoned`."""
    error: str = ""
    """Why no checkpoint can be chosen."""


def _choose(config: Config, run_dir: Path, attempt: int) -> _Choice:
    """Chooses the checkpoint by ``train.resume``. It changes no file."""
    own, wanted = Run(run_dir).checkpoints, config.train.resume
    asked = None if wanted in ("auto", "never") else Path(wanted).expanduser().resolve()
    # `never` or a path holds until this launch has made a step. Later attempts resume from what was saved since.
    is_new = attempt == 0 or (wanted != "auto" and not Run(run_dir).state().trains)
    if is_new and wanted == "never":
        return _Choice(abandoned=store.steps_in(own))
    if is_new and asked is not None:
        return _choose_at(asked, own)
    newest = store.newest(own)
    if newest.path is None and asked is not None:
        return _choose_at(asked, own)
    return _Choice(newest.path, newest.skipped)


def _believed(choice: _Choice, run_dir: Path) -> _Choice:
    """Refuses a checkpoint from outside the run folder that others may have written.

    The run's own folder was checked when the run was launched again.
    """
    # A path that was asked for is resolved. One that `auto` has found may lead through a link.
    if choice.path is None or choice.path.resolve().is_relative_to(run_dir.resolve()):
        return choice
    try:
        require_own(choice.path, choice.path / manifest.NAME, use="train.resume")
    except RequestError as error:
        return _Choice(error=str(error))
    return choice


def _choose_at(path: Path, own: Path) -> _Choice:
    """Chooses the checkpoint that a user's path names.

    Args:
        path: a checkpoint, a run folder, or a folder of checkpoints.
        own: the folder of this run's checkpoints.
    """
    if not (path / manifest.NAME).exists():
        return _choose_newest_in(path, own)
    if wrong := manifest.problems(path):
        return _Choice(error=f"train.resume={path}: the checkpoint is damaged: {wrong[0]}")
    if path.parent != own.resolve():
        return _Choice(path, abandoned=store.steps_in(own))
    # The run continues from an earlier step, so its later checkpoints no longer belong to it.
    step = store.step_of(path) or 0
    return _Choice(path, abandoned=[later for later in store.steps_in(own) if (store.step_of(later) or 0) > step])


def _choose_newest_in(folder: Path, own: Path) -> _Choice:
    checkpoints = Run(folder).checkpoints
    found = store.newest(checkpoints if checkpoints.is_dir() else folder)
    if found.path is None:
        lines = [f"train.resume={folder}: there is no complete checkpoint in it", *found.skipped]
        return _Choice(error="\n".join(lines))
    is_own = found.path.parent.resolve() == own.resolve()
    return _Choice(found.path, found.skipped, [] if is_own else store.steps_in(own))


def _from_first(choice: _Choice, group: dist.ProcessGroup) -> _Choice:
    """Returns the first worker's choice on all workers."""
    sent = [choice]
    dist.broadcast_object_list(sent, 0, group=group)
    return sent[0]


def _read(path: Path, choice: _Choice, workers: Workers) -> Start:
    """Reads a checkpoint's facts and this worker's own state."""
    own, meta = _own_of(path, workers.rank), store.read_meta(path)
    if BUFFERS not in meta:  # A checkpoint of an older version.
        return Start(path, meta, own, notes=choice.notes, abandoned=choice.abandoned)
    then = int(meta.get("workers", 0))
    buffers = dict((own if workers.is_first else _own_of(path, 0)).get(BUFFERS, {}))
    notes = list(choice.notes)
    if then == workers.world_size:
        buffers |= own.get(BUFFERS, {})
    elif differing := meta[BUFFERS]:
        more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        notes.append(
            f"{path} was written by {counted(then, 'worker')}, which differed in the buffers "
            f"{', '.join(differing[:_SHOWN])}{more}: in this run of {counted(workers.world_size, 'worker')} all begin "
            "with the first one's"
        )
    return Start(path, meta, own, buffers, notes, choice.abandoned)


def _own_of(path: Path, rank: int) -> dict[str, Any]:
    """What the worker of a rank has saved in a checkpoint; empty if there was no such worker."""
    file = path / WORKERS / f"rank-{rank}.pt"
    return dict(reading.load(file)) if file.is_file() else {}


def _check_run(config: Config, start: Start, workers: Workers) -> None:
    then, now = str(start.meta.get("kind")), kind_of(config)
    if then != now:
        raise RequestError(
            f"{start.path} was written with {kind_in_words(then)} and this run has {kind_in_words(now)}: use the same, "
            f"or {_NEW_RUN}"
        )
    reason = trainer_of(config.trainer).same_workers_reason(config.trainer, config.optimizer)
    if reason is not None and start.workers != workers.world_size:
        raise RequestError(
            f"{start.path} was written by {counted(start.workers, 'worker')}: {reason}, so resume with as many "
            f"(launcher.workers_per_node={start.workers})"
        )
    written = start.meta.get("precision", config.train.precision.value)
    if trainer_of(config.trainer).keeps_precision and written != config.train.precision.value:
        raise RequestError(
            f"{start.path} was written with train.precision={written}, for which trainer={config.trainer.name} has a "
            f"state of its own, and this run has train.precision={config.train.precision.value}: use the same, or "
            f"{_NEW_RUN}"
        )
    for key, mine in optimizer_of(config).items():
        # Checkpoints of older versions do not have these values.
        theirs = start.meta.get("optimizer", {}).get(key, [] if key == "optimizer.groups" else mine)
        if theirs != mine:
            raise RequestError(
                f"{start.path} has the state of an optimizer with {key}={_word(theirs)}, and this run has "
                f"{key}={_word(mine)}: use the same, or {_NEW_RUN}"
            )
    if start.path is not None and config.train.counts_steps and start.step > config.train.steps:
        raise RequestError(store.beyond(start.path, start.step, config.train.steps))
    if start.meta.get("seed") != config.seed:
        raise RequestError(
            f"{start.path} was written with seed={start.meta.get('seed')}, which orders the data, and this run has "
            f"seed={config.seed}: use the same"
        )


def _word(value: Any) -> str:
    """The value as a user types it."""
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def _listed(title: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{title} {', '.join(names[:_SHOWN])}{more}"]
