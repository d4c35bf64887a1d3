"""The folder ``checkpoints`` of a run. A checkpoint in it is either complete or absent.

A checkpoint is written as ``step-00000100.partial`` and renamed when everything in it is on the disk. A partial or
damaged checkpoint is reported and left unchanged. A folder that has the name of a new checkpoint is renamed, never
removed. This module needs only the standard library.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortlaunch.base.errors import RequestError
from ortlaunch.base.ownership import closed_to_others
from ortlaunch.base.reading import load_json
from ortlaunch.run import manifest

META = "run.json"
PARTIAL = ".partial"
CONVERTED = "universal"
"""The folder below a run's `scratch` in which DeepSpeed converts a checkpoint of another number of workers."""
_DELETING = ".deleting"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Found:
    """What a search for the newest checkpoint found."""

    path: Path | None
    """The newest complete checkpoint; None where there is none."""
    skipped: list[str]
    """Why each newer checkpoint was skipped, one line each."""


class Store:
    """The checkpoints of one run. Only one process calls its methods: the first worker."""

    def __init__(self, folder: Path, keep: int, scored_by: str = "") -> None:
        """
        Args:
            folder: the folder of the checkpoints. It is created with the first checkpoint.
            keep: how many of the newest complete checkpoints are kept.
            scored_by: the value by which the best one is chosen, with its direction; the evaluation loss if empty.
        """
        self.folder = folder
        self._keep = keep
        self._scored_by = scored_by

    def begin(self, step: int) -> Path:
        """Creates the empty folder that a checkpoint is written into."""
        partial = self.partial(step)
        with closed_to_others():
            self.folder.mkdir(parents=True, exist_ok=True)
            set_aside(partial)
            partial.mkdir()
        return partial

    def partial(self, step: int) -> Path:
        """The folder of a step's checkpoint while it is being written."""
        return self.folder / (name_of(step) + PARTIAL)

    def commit(self, step: int, meta: dict[str, Any]) -> Path:
        """Makes the written folder a checkpoint.

        Args:
            step: the step.
            meta: facts about the checkpoint, stored as ``run.json``.

        Raises:
            OSError: the disk is full or broken. There is then no checkpoint of this step.
        """
        partial, final = self.partial(step), self.folder / name_of(step)
        (partial / META).write_text(json.dumps(meta, indent=1) + "\n")
        manifest.seal(partial)
        set_aside(final)
        partial.rename(final)
        manifest.sync_folder(self.folder)
        return final

    def tidy(self, checkpoint: Path) -> None:
        """Points the links at a new checkpoint, then removes the checkpoints that are no longer kept.

        Raises:
            OSError: a link cannot be made or a checkpoint not removed. The new checkpoint is complete all the same.
        """
        self._point("latest", checkpoint)
        if (best := self._best()) is not None:
            self._point("best", best)
        self.prune()

    def abandon(self, step: int) -> None:
        """Removes the partial checkpoint that this process cannot finish: it may be what fills the disk."""
        partial = self.partial(step)
        if partial.is_dir():
            _remove(partial, [path.relative_to(partial).as_posix() for path in partial.rglob("*") if path.is_file()])

    def prune(self) -> None:
        """Removes complete checkpoints that are older than the newest `keep`, but never ``best``.

        A checkpoint is removed only if it holds no other files and every byte of it is as it was written. A damaged
        checkpoint stays, so that its owner can look at it.
        """
        kept = 0
        best = self._target("best")
        for path in steps_in(self.folder):
            if manifest.problems(path, contents=False):
                continue
            kept += 1
            if kept <= self._keep or path == best or manifest.strangers(path) or manifest.problems(path):
                continue
            doomed = path.with_name(path.name + _DELETING)
            # Somebody may have put a file into what was to be removed.
            doomed = path.rename(_free(doomed, ".") if doomed.exists() else doomed)
            _remove(doomed, manifest.listed(doomed))
        # These come last: one that cannot be removed keeps no other from being removed.
        for path in sorted(self.folder.glob(f"step-*{_DELETING}*")):
            _remove(path, manifest.listed(path))

    def _best(self) -> Path | None:
        """The complete checkpoint with the best evaluation, the oldest of several; None if none has one.

        All are looked at: a kill may have come between a checkpoint and its link.
        """
        scores = [(_score_of(path, self._scored_by), path) for path in reversed(steps_in(self.folder))]
        found = [(score, path) for score, path in scores if score is not None]
        found = [one for one in found if not manifest.problems(one[1], contents=False)]
        return min(found, key=lambda one: one[0])[1] if found else None

    def _target(self, link: str) -> Path | None:
        path = self.folder / link
        return self.folder / path.readlink() if path.is_symlink() else None

    def _point(self, link: str, target: Path) -> None:
        path = self.folder / link
        if path.exists() and not path.is_symlink():
            return  # The user made this file or folder.
        temporary = self.folder / f".{link}.new"
        temporary.unlink(missing_ok=True)
        if path.is_symlink() and path.readlink() == Path(target.name):
            return
        temporary.symlink_to(target.name)
        temporary.replace(path)


def name_of(step: int) -> str:
    """The folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step in a checkpoint's folder name; None for any other name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def steps_in(folder: Path) -> list[Path]:
    """The folders that have a checkpoint's name, the newest first."""
    paths = [path for path in folder.glob("step-*") if step_of(path) is not None and path.is_dir()]
    return sorted(paths, key=lambda path: step_of(path) or 0, reverse=True)


def newest_name(folder: Path) -> str:
    """The name of the newest checkpoint that has a manifest, or an empty text. It does not read the files."""
    found = (path.name for path in steps_in(folder) if (path / manifest.NAME).is_file())
    return next(found, "")


def newest(folder: Path) -> Found:
    """Finds the newest checkpoint that is as it was written. It reads every byte to check that."""
    skipped: list[tuple[int, str]] = []
    complete = None
    for path in steps_in(folder):
        wrong = manifest.problems(path)
        if not wrong:
            complete = path
            break
        skipped.append((step_of(path) or 0, f"{path} is damaged, left where it is: {wrong[0]}"))
    reached = step_of(complete) or 0 if complete is not None else 0
    for path in folder.glob(f"step-*{PARTIAL}*"):
        step = step_of(Path(path.name.partition(PARTIAL)[0])) or 0
        if step > reached:
            skipped.append((step, f"{path} was never finished, left where it is"))
    return Found(complete, [line for _, line in sorted(skipped, reverse=True)])


def beyond(checkpoint: Path, step: int, steps: int) -> str:
    """Says that a run of so many steps cannot resume from a checkpoint of a later step."""
    return (
        f"{checkpoint} was written after step {step}, and train.steps={steps} is less: train.steps counts all steps, "
        "those before the checkpoint too"
    )


def check_steps(checkpoint: Path, steps: int) -> None:
    """Refuses a run that would end before the checkpoint that it goes on from, which its workers would find too.

    Workers pass over a damaged checkpoint, so this one must be whole; its files are read only if it is too late a step.

    Raises:
        RequestError: the number of steps is too small.
    """
    step = step_of(checkpoint) or 0
    if step > steps and not manifest.problems(checkpoint):
        raise RequestError(beyond(checkpoint, step, steps))


def read_meta(checkpoint: Path) -> dict[str, Any]:
    """A checkpoint's facts, as they were given to `Store.commit`; empty where they cannot be read."""
    try:
        meta = load_json(checkpoint / META)
    except (OSError, ValueError):
        return {}
    return meta if isinstance(meta, dict) else {}


def _score_of(checkpoint: Path, scored_by: str) -> float | None:
    """The evaluation of a checkpoint, the lower the better; None where it has none that can be compared, such as NaN.

    A run that goes on may be scored by another value than before it was stopped.
    """
    meta = read_meta(checkpoint)
    best = meta.get("best")
    of = best.get("of") if isinstance(best, dict) else None
    score = meta.get("score") if scored_by and of == scored_by else None
    if scored_by in ("", "eval/loss:min"):
        score = meta.get("eval_loss")
    return score if isinstance(score, int | float) and math.isfinite(score) else None


def set_aside(path: Path) -> Path | None:
    """Renames the file or folder at this path, if there is one, and returns its new path."""
    if not path.exists() and not path.is_symlink():
        return None
    return path.rename(_free(path, "." if PARTIAL in path.name else ".aside-"))


def _free(path: Path, ending: str) -> Path:
    """The path with an ending and the first number with which nothing has that name."""
    numbered = (path.with_name(f"{path.name}{ending}{number}") for number in itertools.count(1))
    return next(one for one in numbered if not one.exists())


def _remove(folder: Path, names: list[str]) -> None:
    """Removes the named files, then the manifest, then the empty folders. Any other file stays."""
    for name in [*names, manifest.NAME]:
        (folder / name).unlink(missing_ok=True)
    inner = [path for path in folder.rglob("*") if path.is_dir()]
    for path in [*sorted(inner, reverse=True), folder]:
        try:
            path.rmdir()
        except OSError:
            return


def remove_converted(scratch: Path) -> None:
    """Removes a converted checkpoint. Files in `scratch` that are not ours stay, and so does a link to elsewhere."""
    if scratch.is_symlink():
        return
    shutil.rmtree(scratch / CONVERTED, ignore_errors=True)
    with suppress(OSError):
        scratch.rmdir()
