"""One journal's way to MLflow, chunk by chunk, with its state in the run folder; a sweep's before those of its runs."""

from __future__ import annotations

import json
import logging
from collections import deque
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from ortlaunch.base.files import replace_text
from ortlaunch.base.locks import exclusive
from ortlaunch.base.secrets import redacted, scrubbed
from ortlaunch.config.schema import MlflowConfig
from ortlaunch.run.events import Started
from ortlaunch.run.journal import Chunk, iterate, read_chunk
from ortlaunch.run.run import Run
from ortlaunch.tracking.sink import Identity, MlflowSink
from ortlaunch.tracking.translate import Operation, Translator

_CHUNK_BYTES = 64 * 1024
_ERROR_LENGTH = 500


class RelayBusy(Exception):
    """Another process is sending the same run."""


class ParentUnknown(Exception):
    """The parent run could not be created now; it is tried again."""


@dataclass
class RelayState:
    """What `relay.json` holds."""

    uri: str
    """The store that the rest is about, without credentials."""
    mlflow_run_id: str | None = None
    offset: int = 0
    """Bytes of the journal that the store has."""
    refused: int = 0
    """Values and lines that were left out."""


def load_state(run_dir: Path, uri: str) -> RelayState:
    """Reads `relay.json`; a fresh state if it is missing, broken or about another store."""
    fresh = RelayState(redacted(uri))
    try:
        state = RelayState(**json.loads(Run(run_dir).relay_file.read_text()))
        same = state.uri == fresh.uri and _is_line_start(Run(run_dir).journal_file, state.offset)
    except (OSError, ValueError, TypeError):
        return fresh
    return state if same else fresh


def _is_line_start(journal: Path, offset: int) -> bool:
    with journal.open("rb") as file:
        return offset == 0 or (file.seek(offset - 1) >= 0 and file.read(1) == b"\n")


def save_state(run_dir: Path, state: RelayState) -> None:
    """Replaces `relay.json` in one step."""
    replace_text(Run(run_dir).relay_file, json.dumps(asdict(state)) + "\n")


def unsent_events(run_dir: Path, uri: str) -> tuple[int, str | None]:
    """How many complete events a store lacks, and its id of the run if it has one."""
    state = load_state(run_dir, uri)
    return len(read_chunk(Run(run_dir).journal_file, state.offset).events), state.mlflow_run_id


class Forwarder:
    """Sends a journal, a chunk at a time; a chunk that was sent in part is sent again as a whole, without harm."""

    def __init__(self, run_dir: Path, cfg: MlflowConfig) -> None:
        self.last_error = ""
        self.sent_events = 0
        self._run_dir = run_dir
        self._cfg = cfg
        self._journal = Run(run_dir).journal_file
        self._log = relay_log(run_dir, cfg.uri)
        self._sink = MlflowSink(cfg, run_dir, self._log, parent_id)
        self._held = ExitStack()
        self._state: RelayState | None = None
        self._translator = Translator()
        self._contacted = False
        self._chunk: Chunk | None = None
        self._pending: deque[Operation] = deque()

    @property
    def refused(self) -> int:
        """Values that were left out, over all relays of this run."""
        return self._state.refused if self._state else 0

    @property
    def behind(self) -> bool:
        """Whether the journal has so much that was not sent that there is no more to be gathered."""
        if self._state is None:
            return False
        try:
            return self._journal.stat().st_size - self._state.offset >= _CHUNK_BYTES
        except OSError:  # Somebody removed the folder.
            return False

    def try_step(self, final: bool) -> bool | None:
        """Sends the next chunk.

        Args:
            final: The journal is complete; a missing start is made up for.

        Returns:
            Whether there was something to send; None after a failure, which is logged and in `last_error`.
        """
        try:
            moved = self._step(final)
        except Exception as error:
            self._note_failure(error)
            return None
        if moved and self.last_error:
            self._log.info("MLflow takes events again")
            self.last_error = ""
        return moved

    def close(self) -> None:
        """Lets others send this run, and closes the log."""
        self._held.close()
        for handler in self._log.handlers:
            handler.close()

    def _step(self, final: bool) -> bool:
        if not self._journal.exists():
            return False
        state = self._state or self._take_over()
        if self._chunk is None and not self._read_next(state, final):
            return False
        chunk = self._chunk or Chunk([], state.offset)
        if chunk.events and not self._contacted:
            state.mlflow_run_id = self._sink.contact(self._identity(), state.mlflow_run_id)
            self._contacted = True
            save_state(self._run_dir, state)
        while self._pending:
            self._sink.send(self._pending[0])
            self._pending.popleft()
        state.refused += self._sink.refused
        self._sink.refused = 0
        state.offset = chunk.offset
        save_state(self._run_dir, state)
        self.sent_events += len(chunk.events)
        self._chunk = None
        return True

    def _take_over(self) -> RelayState:
        """Locks out other relays of this run, then goes on where the last one stopped."""
        if not self._held.enter_context(exclusive(Run(self._run_dir).relay_lock)):
            self._held.close()
            raise RelayBusy("another ortlaunch process is sending this run")
        state = load_state(self._run_dir, self._cfg.uri)
        offset = 0
        while offset < state.offset:  # The translator learns which points and parameters were sent.
            chunk = read_chunk(self._journal, offset, min(_CHUNK_BYTES, state.offset - offset))
            self._translator.translate(chunk.events)
            offset = chunk.offset
        self._translator.notes.clear()
        self._state = state
        return state

    def _read_next(self, state: RelayState, final: bool) -> bool:
        if state.mlflow_run_id is None and not final and self._first_start() is None:
            return False
        chunk = read_chunk(self._journal, state.offset, _CHUNK_BYTES)
        if chunk.offset == state.offset:
            return False
        for position in chunk.corrupt:
            self._log.error("left out a line that is no journal event, at byte %d", position)
        state.refused += len(chunk.corrupt)
        self._pending.extend(self._translator.translate(chunk.events))
        for note in self._translator.notes:
            self._log.warning("%s", note)
        self._translator.notes.clear()
        self._chunk = chunk
        return True

    def _first_start(self) -> Started | None:
        return next((event for event in iterate(self._journal) if isinstance(event, Started)), None)

    def _identity(self) -> Identity:
        start = self._first_start()
        if start is not None:
            return Identity(start.experiment, start.name, start.run_id, start.t)
        # The run died before it said what it is; its folder is runs/<experiment>/<timestamp>-<name>-<id>.
        folder = self._run_dir.resolve()
        first = next(iterate(self._journal))
        return Identity(folder.parent.name, folder.name, folder.name.rpartition("-")[2], first.t)

    def _note_failure(self, error: Exception) -> None:
        text = scrubbed(f"{type(error).__name__}: {error}", self._cfg.uri)[:_ERROR_LENGTH]
        if text != self.last_error:
            self._log.warning("not sent, trying again: %s", text)
        self.last_error = text


def parent_id(folder: Path, cfg: MlflowConfig) -> str | None:
    """MLflow's id of a sweep's parent run, which is created if nobody has yet.

    Args:
        folder: the sweep's folder.
        cfg: the store.

    Returns:
        None if the folder is gone: the run then stands alone.

    Raises:
        ParentUnknown: the store cannot be reached, or another process is creating it.
    """
    if not Run(folder).journal_file.is_file():
        return None
    if known := load_state(folder, cfg.uri).mlflow_run_id:
        return known
    forwarder = Forwarder(folder, cfg)
    try:
        forwarder.try_step(final=False)
    finally:
        forwarder.close()
    if known := load_state(folder, cfg.uri).mlflow_run_id:
        return known
    raise ParentUnknown(f"the run of the sweep {folder}: {forwarder.last_error or 'not yet there'}")


class _ScrubbingFormatter(logging.Formatter):
    def __init__(self, uri: str) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self._uri = uri

    def format(self, record: logging.LogRecord) -> str:
        return scrubbed(super().format(record), self._uri)


class _QuietFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk must not print tracebacks into the user's terminal."""


def relay_log(run_dir: Path, uri: str) -> logging.Logger:
    """A logger of this run alone, into `logs/relay.log`, that writes no credentials."""
    log = logging.Logger("ortlaunch.relay", logging.INFO)
    try:
        Run(run_dir).logs.mkdir(exist_ok=True)
        handler: logging.Handler = _QuietFile(Run(run_dir).relay_log, encoding="utf-8")
    except OSError:
        handler = logging.NullHandler()
    handler.setFormatter(_ScrubbingFormatter(uri))
    log.addHandler(handler)
    return log
