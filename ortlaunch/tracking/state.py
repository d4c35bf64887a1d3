"""The progress of sending a run's journal to a tracker. Each tracker has a small file in the run folder."""

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
from ortlaunch.base.reading import load_json, open_plain
from ortlaunch.run.events import is_count
from ortlaunch.run.journal import read_chunk
from ortlaunch.run.run import Run
from ortlaunch.tracking import trackers
from ortlaunch.tracking.tracker import Tracker

T = TypeVar("T")


@dataclass
class RelayState:
    """The content of the file."""

    place: str
    """The place of the records, without credentials. The other fields are valid only for this place."""
    mark: str | None = None
    """The tracker's mark of the run, such as its id of the run."""
    offset: int = 0
    """The number of bytes of the journal that the tracker has."""
    refused: int = 0
    """The number of values and lines that were left out."""


@dataclass(frozen=True)
class Unusable:
    """Replaces the configuration of a tracker that is not installed here, or that no longer accepts it."""

    name: str
    why: str


class Unavailable(Tracker[Any]):
    """Replaces a tracker that cannot be used. Sending to it fails with the reason."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(name)
        self._why = why

    def sink(self, cfg: Any, context: object) -> Any:
        """Raises the reason why the tracker cannot be used.

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
        """The place of the records, without credentials."""
        return _answer(lambda: self.tracker.place(self.cfg), self.tracker.name)

    def where(self, mark: str | None) -> str:
        """A short text that says where the run is recorded."""
        return _answer(lambda: self.tracker.where(self.cfg, self.run_dir, mark), self.tracker.title)

    def lines(self, experiment: str, mark: str | None) -> list[tuple[str, str]]:
        """The lines to print at the end of a run that was sent completely, as labels and texts."""
        return _answer(lambda: self.tracker.lines(self.cfg, self.run_dir, experiment, mark), [])

    def scrubbed(self, text: str) -> str:
        """The text without the credentials of the tracker's configuration."""
        return _answer(lambda: self.tracker.scrubbed(self.cfg, text), "(the tracker fails to hide its credentials)")

    @property
    def journal(self) -> Path:
        """The journal that is sent."""
        return Run(self.run_dir).journal_file

    @property
    def lock(self) -> Path:
        """The lock file of the process that sends the journal."""
        return Run(self.run_dir).tracker_lock(self.tracker.name)

    def load(self) -> RelayState:
        """Reads the state. If the file is missing, broken or for another place, the state is a new one."""
        fresh = RelayState(self.place)
        try:
            stored = load_json(self._state_file)
            mark, offset, refused = stored[self.tracker.mark_key], stored["offset"], stored["refused"]
            if not (isinstance(mark, str | None) and is_count(offset) and offset >= 0 and is_count(refused)):
                return fresh
            state = RelayState(str(stored["uri"]), mark, offset, refused)
            # The place of a tracker that is not installed is unknown, and nothing is sent to it.
            same = isinstance(self.tracker, Unavailable) or state.place == fresh.place
            same = same and _is_line_start(self.journal, state.offset)
        except (OSError, ValueError, TypeError, KeyError):
            return fresh
        return state if same else fresh

    def save(self, state: RelayState) -> None:
        """Replaces the file atomically."""
        content = {
            "uri": state.place,
            self.tracker.mark_key: state.mark,
            "offset": state.offset,
            "refused": state.refused,
        }
        replace_text(self._state_file, json.dumps(content) + "\n")

    def unsent(self) -> int:
        """The number of complete events that the tracker lacks."""
        return len(read_chunk(self.journal, self.load().offset).events)

    @property
    def _state_file(self) -> Path:
        return Run(self.run_dir).tracker_file(self.tracker.name)


def destination(run_dir: Path, cfg: Any) -> Destination:
    """The destination of a run by a tracker's configuration. A tracker that cannot be loaded fails only on sending."""
    if isinstance(cfg, Unusable):
        return Destination(run_dir, cfg, Unavailable(cfg.name, cfg.why))
    try:
        return Destination(run_dir, cfg, trackers.find(cfg.name))
    except RequestError as error:
        return Destination(run_dir, cfg, Unavailable(cfg.name, str(error)))


@contextmanager
def unattended(run_dir: Path) -> Iterator[bool]:
    """Locks all relays of a run out, and yields whether none was sending."""
    with ExitStack() as stack:
        yield all(stack.enter_context(exclusive(lock)) for lock in Run(run_dir).tracker_locks())


def _answer(ask: Callable[[], T], otherwise: T) -> T:
    """The result of a tracker's method, or a default if it raises: a user's own tracker must not end a run."""
    try:
        return ask()
    except Exception:
        return otherwise


def _is_line_start(journal: Path, offset: int) -> bool:
    with open_plain(journal) as file:
        return offset == 0 or (file.seek(offset - 1) >= 0 and file.read(1) == b"\n")
