"""Where a run goes on: which checkpoint, whether it fits this run, and what of it each worker takes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ortlaunch.base.errors import RequestError
from ortlaunch.config.schema import Config, DeepSpeedConfig
from ortlaunch.data.position import Position
from ortlaunch.run import checkpoints as store
from ortlaunch.run import manifest
from ortlaunch.run.run import Run
from ortlaunch.trainer.checkpoint.saver import WORKERS
from ortlaunch.trainer.workers import Workers

_SHOWN = 5


@dataclass(frozen=True)
class Start:
    """Where training begins."""

    path: Path | None = None
    """The checkpoint; None for a beginning from nothing."""
    meta: dict[str, Any] = field(default_factory=dict)
    """The facts in it."""
    own: dict[str, Any] = field(default_factory=dict)
    """What this worker left in it; empty for a worker that was not there."""
    notes: list[str] = field(default_factory=list)
    """Newer checkpoints that could not be taken, one line each."""

    @property
    def step(self) -> int:
        """Steps that are done."""
        return int(self.meta.get("step", 0))

    @property
    def tokens(self) -> int:
        """Tokens that all workers have seen."""
        return int(self.meta.get("tokens", 0))

    @property
    def workers(self) -> int:
        """Workers that wrote it."""
        return int(self.meta.get("workers", 0))

    @property
    def position(self) -> Position:
        """Where this worker goes on in the data."""
        place = self.own.get("position", self.meta.get("position"))
        return Position(**place) if place else Position()


def find(config: Config, run_dir: Path, workers: Workers, group: dist.ProcessGroup, *, attempt: int) -> Start:
    """Finds where to begin; all workers call it and get the same answer.

    Args:
        config: the run's configuration.
        run_dir: its folder.
        workers: this worker's place.
        group: all workers on the CPU.
        attempt: how often torchrun has started the workers before, in this launch.

    Raises:
        RequestError: ``train.resume`` names no complete checkpoint, or one that does not fit this run.
    """
    answer = [""]
    if workers.is_first:
        answer = [json.dumps(_find_first(config, run_dir, attempt))]
    dist.broadcast_object_list(answer, 0, group=group)
    found = json.loads(answer[0])
    if "error" in found:
        raise RequestError(found["error"])
    if found["path"] is None:
        return Start(notes=found["notes"])
    path = Path(found["path"])
    file = path / WORKERS / f"rank-{workers.rank}.pt"
    own = torch.load(file, weights_only=True) if file.is_file() else {}
    start = Start(path, store.read_meta(path), own, found["notes"])
    _check_run(config, start, workers)
    return start


def check_model(start: Start, shapes: dict[str, list[int]]) -> None:
    """Refuses a checkpoint of another model.

    Args:
        start: where to begin.
        shapes: shape of each parameter and buffer of the plain model, by name.

    Raises:
        RequestError: which names and shapes differ.
    """
    if start.path is not None and (lines := differences(start.meta["shapes"], shapes)):
        raise RequestError(f"{start.path} is of another model:\n" + "\n".join(lines))


def differences(stored: dict[str, list[int]], model: dict[str, list[int]]) -> list[str]:
    """How stored names and shapes differ from the model's, a few lines; empty if they do not."""
    lines = _listed("the model has no", [name for name in stored if name not in model])
    lines += _listed("there is no", [name for name in model if name not in stored])
    other = [
        f"{name}: {tuple(stored[name])} there, {tuple(model[name])} in the model"
        for name in stored
        if name in model and list(stored[name]) != list(model[name])
    ]
    return lines + _listed("other shape:", other)


def shapes_of(model: torch.nn.Module) -> dict[str, list[int]]:
    """Shape of each parameter and buffer of a plain model, by name."""
    return {name: list(value.shape) for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def reading_of(config: Config, samples: int | None) -> dict[str, Any]:
    """The keys without which a place in a stream says nothing, since it counts batches; none for a data set, whose
    `samples` have numbers."""
    if samples is not None:
        return {}
    of_data = ("seq_len", "workers", "eval_fraction", "eval_split")
    reading = {f"data.{name}": getattr(config.data, name) for name in of_data}
    return {"train.batch_size": config.train.batch_size, **reading}


def check_data(start: Start, fingerprint: str, samples: int | None, workers: Workers, reading: dict[str, Any]) -> None:
    """Refuses to go on in other data than the checkpoint's, or in a stream that is read otherwise.

    Args:
        start: where to begin.
        fingerprint: of this run's data.
        samples: how many samples it is cut into; None for a stream.
        workers: this worker's place.
        reading: what `reading_of` says of this run.

    Raises:
        RequestError: with what differs.
    """
    if start.path is None:
        return
    for what, then, now in (
        ("data with the fingerprint", start.meta["data"], fingerprint),
        ("data of this many samples:", start.meta["samples"], samples),
    ):
        if then != now:
            raise RequestError(
                f"{start.path} was written in the midst of {what} {then}, and this run has {now}: give the same data, "
                "or begin anew from its weights, by ortlaunch export weights and model.weights"
            )
    if samples is None and start.workers != workers.world_size:
        raise RequestError(
            f"{start.path} was written by {start.workers} workers, each in its own part of a stream: go on with as "
            f"many (launcher.workers_per_node={start.workers}), or take data.streaming=false"
        )
    for key, now in reading.items():
        # Checkpoints of older versions do not say.
        then = start.meta.get("reading", {}).get(key, now)
        if then != now:
            raise RequestError(
                f"{start.path} counts the batches of a stream that was read with {key}={_word(then)}, and this run has "
                f"{key}={_word(now)}: use the same, or begin anew from its weights, by ortlaunch export weights and "
                "model.weights"
            )


def kind_of(config: Config) -> str:
    """How the workers share the training state: only a checkpoint of the same kind can be loaded."""
    if isinstance(config.trainer, DeepSpeedConfig):
        return f"trainer=deepspeed trainer.zero_stage={config.trainer.zero_stage}"
    return "trainer=ddp or trainer=single"


def _find_first(config: Config, run_dir: Path, attempt: int) -> dict[str, Any]:
    own, wanted = Run(run_dir).checkpoints, config.train.resume
    if wanted == "never" and attempt == 0:
        for earlier in store.steps_in(own):
            store.set_aside(earlier)
        return {"path": None, "notes": []}
    # A path is where the first attempt begins; what that has saved since is further on.
    if wanted not in ("auto", "never") and attempt == 0:
        return _named(Path(wanted).expanduser().resolve(), own)
    found = store.newest(own)
    if found.path is None and wanted not in ("auto", "never"):
        return _named(Path(wanted).expanduser().resolve(), own)
    return {"path": str(found.path) if found.path else None, "notes": found.skipped}


def _named(path: Path, own: Path) -> dict[str, Any]:
    """The checkpoint that a user's path means."""
    if not (path / manifest.NAME).exists():
        inner = Run(path).checkpoints if Run(path).checkpoints.is_dir() else path
        found = store.newest(inner)
        if found.path is None:
            return {"error": "\n".join([f"train.resume={path}: there is no complete checkpoint in it", *found.skipped])}
        return {"path": str(found.path), "notes": found.skipped}
    if wrong := manifest.problems(path):
        return {"error": f"train.resume={path}: the checkpoint is damaged: {wrong[0]}"}
    if path.parent == own.resolve():
        # What this run had saved further on belongs to another continuation from now on.
        for later in store.steps_in(own):
            if (store.step_of(later) or 0) > (store.step_of(path) or 0):
                store.set_aside(later)
    return {"path": str(path), "notes": []}


def _check_run(config: Config, start: Start, workers: Workers) -> None:
    if start.meta.get("kind") != kind_of(config):
        raise RequestError(
            f"{start.path} was written with {start.meta.get('kind')} and this run has {kind_of(config)}: use the same, "
            "or begin anew from its weights, by ortlaunch export weights and model.weights"
        )
    sharded = isinstance(config.trainer, DeepSpeedConfig) and config.trainer.zero_stage > 0
    if sharded and start.workers != workers.world_size and not config.optimizer.can_be_resharded:
        raise RequestError(
            f"{start.path} was written by {start.workers} workers: DeepSpeed shares out anew the state of AdamW alone, "
            f"so go on with as many (launcher.workers_per_node={start.workers})"
        )
    if start.meta.get("seed") != config.seed:
        raise RequestError(
            f"{start.path} was written with seed={start.meta.get('seed')}, which orders the data, and this run has "
            f"seed={config.seed}: use the same"
        )


def _word(value: Any) -> str:
    """A value as it is typed."""
    return "null" if value is None else str(value)


def _listed(title: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{title} {', '.join(names[:_SHOWN])}{more}"]
