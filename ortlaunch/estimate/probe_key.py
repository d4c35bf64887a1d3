"""What the memory of a run depends on: the key under which its probes are kept."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib.machinery import PathFinder
from itertools import chain, count, islice, takewhile
from pathlib import Path
from typing import Any

import ortlaunch
from ortlaunch.base.errors import RequestError
from ortlaunch.base.modules import in_working_folder
from ortlaunch.config.candidates import possible
from ortlaunch.config.devices import resolve_device
from ortlaunch.config.schema import Config, OrtConfig, TrainConfig
from ortlaunch.data.files import find_files
from ortlaunch.launch.allocator import allocator_variables

_PLAIN_DATA = ("pysource", "synthetic", "digits")
"""Data sources whose size is in their keys."""
_PACKAGES = ("torch", "transformers", "deepspeed", "onnxruntime-training", "onnxruntime-training-cpu")
_VARIABLES = (
    *("MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_ARENA_MAX"),
    *("GLIBC_TUNABLES", "LD_PRELOAD"),
)
"""Variables that change what a process keeps."""
_MOST_FILES = 500
MOST_STEPS = 20
"""After so many steps a run does not need more memory."""


def key_of(config: Config, workers: int, nodes: int) -> str:
    """A name for all that the memory of a run depends on.

    Args:
        config: the run's configuration.
        workers: workers on each machine.
        nodes: machines.
    """
    train = asdict(config.train)
    train["steps"] = min(config.train.steps, MOST_STEPS)
    # Such a step holds gradients of ONNX Runtime and of PyTorch beside the optimizer's state.
    rechecks = [one.backend.first_recheck for one in possible(config) if isinstance(one.backend, OrtConfig)]
    train["rechecks"] = any(step is not None and step <= config.train.steps for step in rechecks)
    for name in ("log_every", "steady_after", "gc_every", "keep_checkpoints", "resume", "memory_check"):
        del train[name]
    if config.train.checkpoint_every is not None:
        # One copy is gone when it is written; the memory of several is kept between them.
        train["checkpoint_every"] = min(config.train.copied_checkpoints(), 2)
    if config.train.eval_every is None:
        del train["eval_samples"]
    else:
        # In a step after an evaluation, gradients of ONNX Runtime are compared.
        train["eval_every"] = config.train.eval_every < config.train.steps
        train["compares_beside_copy"] = bool(rechecks) and compares_beside_copy(config.train)
    groups = {name: asdict(getattr(config, name)) for name in ("model", "data", "backend", "trainer", "optimizer")}
    facts = {
        **groups,
        "train": train,
        "workers": [workers, nodes],
        # The workers share them, and each thread of a worker keeps some memory.
        "cores": getattr(config.launcher, "cpus_per_node", None),
        "device": resolve_device(config.device).value,
        "packages": _versions(),
        "threads": config.launcher.threads,
        "variables": _variables(config),
        "estimate": sorted(_marks(Path(ortlaunch.__file__).parent / "estimate")),
        "own code": _own_code(config),
        "pretrained": _pretrained(config),
        "data files": _data_files(config),
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def compares_beside_copy(train: TrainConfig) -> bool:
    """Whether ONNX Runtime's gradients are compared in the step beside which the run's only copy is written.

    They are in the step after the first, second, fourth evaluation and so on. The memory of several copies stays, so
    that it is beside every comparison.
    """
    if train.eval_every is None or train.copied_checkpoints() != 1:
        return False
    evaluated = takewhile(lambda step: step < train.steps, (train.eval_every << times for times in count()))
    return any(step == train.checkpoint_every for step in evaluated)


def _variables(config: Config) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in _VARIABLES} | allocator_variables(config)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "ortlaunch": ortlaunch.__version__}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _own_code(config: Config) -> list[Any] | None:
    """What tells a changed model or changed data of the user from those before; None if only names and sizes count."""
    model = config.model
    targets = [*model.imports, *([] if model.target is None else [model.target])]
    if not targets and config.data.name in _PLAIN_DATA:
        return None
    found: set[tuple[str, int, int]] = set()
    here = "."
    # A folder that is gone or a module that cannot be found is left to what checks the model.
    with suppress(OSError, ImportError, ValueError):
        here = str(Path.cwd())
        for target in targets:
            package = target.partition(":")[0].partition(".")[0]
            spec = in_working_folder(package) or PathFinder.find_spec(package, [*sys.path, here])
            if spec is not None:
                places = [*(spec.submodule_search_locations or []), *([spec.origin] if spec.origin else [])]
                found |= {mark for place in places for mark in _marks(Path(place))}
    return [here, *sorted(found)]


def _pretrained(config: Config) -> list[tuple[str, int, int]]:
    """What tells a changed folder of a pretrained model from the one before; nothing for a name on the hub."""
    name = config.model.params.get("pretrained")
    if not isinstance(name, str):
        return []
    folder = Path(name).expanduser()
    with suppress(OSError):
        return sorted(_marks_of(islice((one for one in folder.resolve().iterdir() if one.is_file()), _MOST_FILES)))
    return []


def _data_files(config: Config) -> list[int]:
    """What tells changed files of data from those before: how many, their size, and the newest one's time.

    A worker reads all of a text into memory. A name on the hub, and files that are gone, are left to what opens them.
    """
    path = getattr(config.data, "path", None)
    if not isinstance(path, str):
        return []
    with suppress(OSError, RequestError):
        marks = list(_marks_of(find_files(path)))
        return [len(marks), sum(size for _, size, _ in marks), max((time for *_, time in marks), default=0)]
    return []


def _marks(place: Path) -> Iterator[tuple[str, int, int]]:
    """The path, size and time of a source file and of those beside it, or of those in a folder and below it."""
    # A module may import those that lie beside it.
    files: Iterable[Path] = place.rglob("*.py") if place.is_dir() else chain([place], place.parent.glob("*.py"))
    return _marks_of(islice(files, _MOST_FILES))


def _marks_of(files: Iterable[Path]) -> Iterator[tuple[str, int, int]]:
    for path in files:
        try:
            found = path.stat()
        except OSError:
            continue
        yield str(path), found.st_size, found.st_mtime_ns
