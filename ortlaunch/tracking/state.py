"""How far a run's journal was sent to one tracker: a small file in the run folder for each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ortlaunch.base.errors import RequestError
from ortlaunch.base.files import replace_text
from ortlaunch.base.locks import exclusive
from ortlaunch.run.journal import read_chunk
from ortlaunch.run.run import Run
from ortlaunch.tracking import trackers
from ortlaunch.tracking.tracker import Tracker

T = TypeVar("T")


@dataclass
class RelayState:
    """What the file holds."""

    place: str
    """Where the records go, without credentials; the rest is about that place."""
    mark: str | None = None
    """What the tracker calls the run."""
    offset: int = 0
    """Bytes of the journal that it has."""
    refused: int = 0
    """Values and lines that were left out."""


@dataclass(frozen=True)
class Unusable:
    """Stands for the configuration of a tracker that is not installed here, or takes it no longer."""

    name: str
    why: str


class Unavailable(Tracker[Any]):
    """Stands for such a tracker."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(name)
        self._why = why

    def sink(self, cfg: Any, context: object) -> Any:
        """Says why.

        Raises:
            RequestError: always.
        """
        raise RequestError(self._why)


@dataclass(frozen=True)
class Destination:
    """A run folder and one tracker that its journal goes to."""

    run_dir: Path
    cfg: Any
    tracker: Tracker[Any]

    @property
    def place(self) -> str:
        """Where the records go, without credentials."""
        return _answer(lambda: self.tracker.place(self.cfg), self.tracker.name)

    def where(self, mark: str | None) -> str:
        """Where the run is, in a few words."""
        return _answer(lambda: self.tracker.where(self.cfg, self.run_dir, mark), self.tracker.title)

    def lines(self, experiment: str, mark: str | None) -> list[tuple[str, str]]:
        """What to say at the end of a run of which all was sent: labels and texts."""
        return _answer(lambda: self.tracker.lines(self.cfg, self.run_dir, experiment, mark), [])

    def scrubbed(self, text: str) -> str:
        """A text without the credentials of the tracker's configuration."""
        return _answer(lambda: self.tracker.scrubbed(self.cfg, text), "(the tracker fails to hide its credentials)")

    @property
    def journal(self) -> Path:
        """What is sent."""
        return Run(self.run_dir).journal_file

    @property
    def lock(self) -> Path:
        """Held by the one process that sends."""
        return Run(self.run_dir).tracker_lock(self.tracker.name)

    def load(self) -> RelayState:
        """Reads the state; a fresh one if the file is missing, broken or about another place."""
        fresh = RelayState(self.place)
        try:
            stored = json.loads(self._state_file.read_text())
            state = RelayState(
                str(stored["uri"]), stored[self.tracker.mark_key], int(stored["offset"]), int(stored["refused"])
            )
            # Of a tracker that is not installed here nobody knows the place; nothing is sent there either.
            same = isinstance(self.tracker, Unavailable) or state.place == fresh.place
            same = same and _is_line_start(self.journal, state.offset)
        except (OSError, ValueError, TypeError, KeyError):
            return fresh
        return state if same else fresh

    def save(self, state: RelayState) -> None:
        """Replaces the file in one step."""
        content = {
            "uri": state.place,
            self.tracker.mark_key: state.mark,
            "offset": state.offset,
            "refused": state.refused,
        }
        replace_text(self._state_file, json.dumps(content) + "\n")

    def unsent(self) -> int:
        """How many complete events the tracker lacks."""
        return len(read_chunk(self.journal, self.load().offset).events)

    @property
    def _state_file(self) -> Path:
        return Run(self.run_dir).tracker_file(self.tracker.name)


def destination(run_dir: Path, cfg: Any) -> Destination:
    """Where a configuration sends a run; a tracker that cannot be loaded fails when something is sent to it."""
    if isinstance(cfg, Unusable):
        return Destination(run_dir, cfg, Unavailable(cfg.name, cfg.why))
    try:
        return Destination(run_dir, cfg, trackers.find(cfg.name))
    except RequestError as error:
        return Destination(run_dir, cfg, Unavailable(cfg.name, str(error)))


@contextmanager
def unattended(run_dir: Path) -> Iterator[bool]:
    """Keeps relays away from a run; yields whether none was at work."""
    with ExitStack() as stack:
        yield all(stack.enter_context(exclusive(lock)) for lock in Run(run_dir).tracker_locks())


def _answer(ask: Callable[[], T], otherwise: T) -> T:
    """What a tracker says; a user's own that fails to must not end a run."""
    try:
        return ask()
    except Exception:
        return otherwise


def _is_line_start(journal: Path, offset: int) -> bool:
    with journal.open("rb") as file:
        return offset == 0 or (file.seek(offset - 1) >= 0 and file.read(1) == b"\n")
