"""Sends one journal to one tracker in chunks, and keeps the progress in the run folder.

The parent run of a sweep is created in the tracker before the sweep's runs are sent.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from ortlaunch.base.errors import RequestError
from ortlaunch.base.files import PRIVATE
from ortlaunch.base.locks import exclusive
from ortlaunch.base.secrets import is_hidden
from ortlaunch.base.text import library_error
from ortlaunch.run.events import Started, Status
from ortlaunch.run.journal import Chunk, iterate, read_chunk
from ortlaunch.run.run import Run
from ortlaunch.tracking.artifacts import why_not_sent
from ortlaunch.tracking.state import Destination, RelayState, destination
from ortlaunch.tracking.tracker import Context, Identity, RecordLost, RecordRefused, Sink
from ortlaunch.tracking.translate import Artifact, Ended, Operation, Translator

_CHUNK_BYTES = 64 * 1024
_ERROR_LENGTH = 500
_CAUSE_LENGTH = 200
_SLOW_SECONDS = 180.0
"""One step may take this long: a large file takes longer than any time limit of ours."""


class RelayBusy(Exception):
    """Another process is sending the same run."""


class ParentUnknown(Exception):
    """The parent run could not be created now. The caller tries again later."""


class Forwarder:
    """Sends a journal in chunks. A chunk that was sent only in part is sent again as a whole, which is harmless."""

    def __init__(self, to: Destination, asks: bool = False) -> None:
        """
        Args:
            to: the run and the tracker.
            asks: the tracker is asked first whether it still has the run, which takes as long as it takes to answer.
        """
        self.last_error = ""
        self.unasked = ""
        """Why the tracker could not be asked; empty if it has answered or was not asked."""
        self._asks = asks
        self.sent_events = 0
        self.cause = ""
        """Why the tracker has taken no events, in few words; empty if it takes them."""
        self.is_refused = False
        """Whether the tracker will not take the run, however long one waits."""
        self._failing_since: float | None = None
        self._step_since: float | None = None
        self.to = to
        self._run_dir = to.run_dir
        self._journal = to.journal
        self._log = relay_log(to.run_dir, to.tracker.title, to.scrubbed)
        self._held = ExitStack()
        self._is_locked = False
        self._sink: Sink | None = None
        self._state: RelayState | None = None
        self._translator = Translator()
        self._is_open = False
        self._chunk: Chunk | None = None
        self._pending: deque[Operation] = deque()
        self._refused = 0
        self._last_status: Status | None = None

    @property
    def refused(self) -> int:
        """The number of values and lines that were left out, over all relays of this run."""
        return self._state.refused if self._state else 0

    @property
    def behind(self) -> bool:
        """Whether at least one full chunk of the journal is unsent, so that it is useless to wait for more events."""
        if self._state is None:
            return False
        try:
            return self._journal.stat().st_size - self._state.offset >= _CHUNK_BYTES
        except OSError:  # The folder was removed.
            return False

    def try_step(self, final: bool) -> bool | None:
        """Sends the next chunk.

        Args:
            final: the journal is complete. If it has no start event, the run is identified by its folder.

        Returns:
            Whether there was something to send; None after a failure, which is logged and stored in `last_error`.
        """
        began = self._step_since = time.monotonic()
        try:
            moved = self._step(final)
        except (Exception, SystemExit) as error:  # A user's own tracker may raise any exception.
            self._note_failure(error)
            self.is_refused = isinstance(error, RecordRefused)
            if isinstance(error, RecordLost):
                self._begin_again()
            self._failing_since = self._failing_since or began
            return None
        finally:
            self._step_since = None
        self._failing_since, self.is_refused = None, False
        if moved and self.last_error:
            self._log.info("%s takes events again", self.to.tracker.title)
            self.last_error = self.cause = ""
        return moved

    def outage(self) -> tuple[float, str] | None:
        """For how many seconds the tracker has taken no events, and why. None if it takes them. Any thread may ask."""
        failing, step, now = self._failing_since, self._step_since, time.monotonic()
        if failing is not None:
            return now - failing, self.cause
        if step is not None and now - step > _SLOW_SECONDS:
            return now - step, "it does not answer"
        return None

    def known_mark(self) -> str | None:
        """The tracker's mark of the run, if the run was sent before and the tracker still has it."""
        mark = self.to.load().mark
        return mark if mark is not None and self._is_held(self._made_sink(), mark) else None

    def journal_is_gone(self, status: Status) -> None:
        """Makes the next step end the run in the tracker with this status: there is no journal to read it from."""
        self._last_status = status

    def _end_without_journal(self) -> bool:
        status = self._last_status
        if status is None or self._sink is None or not self._is_open:
            return False
        self._pending.append(Ended(status, time.time_ns() // 1_000_000))
        self._send_pending(self._sink)
        self._sink.commit()
        self._last_status = None
        return True

    def close(self) -> None:
        """Releases the lock, so that other processes can send this run, and closes sink and log."""
        if self._sink is not None:
            with suppress(Exception):
                self._sink.close()
        self._held.close()
        for handler in self._log.handlers:
            handler.close()

    def _step(self, final: bool) -> bool:
        """Sends the next chunk.

        The object remembers each part that is done. After a failure, the next call continues with the part that failed.
        """
        if not self._journal.exists():
            return self._end_without_journal()
        sink = self._made_sink()
        state = self._state or self._take_over(sink)
        chunk = self._chunk or self._read_next(state, final)
        if chunk is None:
            return False
        if chunk.events and not self._is_open:
            self._open(sink, state)
        self._send_pending(sink)
        self._commit(sink, state, chunk)
        return True

    def _made_sink(self) -> Sink:
        if self._sink is None:
            context = Context(self._run_dir, self._log, self._refuse, self._mark_of)
            self._sink = self.to.tracker.sink(self.to.cfg, context)
        return self._sink

    def _take_over(self, sink: Sink) -> RelayState:
        """Locks out other relays of this run, then continues from the stored offset."""
        self._lock()
        state = self._stored_state(sink)
        self._translator = self._translator_at(state.offset)
        self._state = state
        return state

    def _lock(self) -> None:
        if self._is_locked:
            return
        if not self._held.enter_context(exclusive(self.to.lock)):
            self._held.close()
            raise RelayBusy("another ortlaunch process is sending this run")
        self._is_locked = True

    def _stored_state(self, sink: Sink) -> RelayState:
        """The progress of earlier relays; none if the tracker has lost what they sent."""
        state = self.to.load()
        if state.mark is None or self._is_held(sink, state.mark):
            return state
        return self._forgotten(state.place)

    def _forgotten(self, place: str) -> RelayState:
        self._log.warning("what was sent before is gone: everything is sent again")
        state = RelayState(place)
        self.to.save(state)
        return state

    def _is_held(self, sink: Sink, mark: str) -> bool:
        """Whether the tracker has the run. One that cannot be asked now counts as having it."""
        if not sink.holds(mark):
            return False
        if not self._asks:
            return True
        try:
            return not sink.has_lost(mark)
        except Exception as error:
            self.unasked = cause_of(error, self.to.scrubbed)
            return True

    def _begin_again(self) -> None:
        """Makes the next step send the whole run as a new one, and a sweep's parent run too if that is lost as well."""
        if self._state is not None:
            self._forgotten(self._state.place)
        self._asks = True
        self._state, self._chunk, self._is_open = None, None, False
        self._pending.clear()

    def _mark_of(self, folder: Path) -> str | None:
        return mark_of(folder, self.to.cfg, self._asks)

    def _translator_at(self, offset: int) -> Translator:
        """A translator that knows which points and parameters of the journal before `offset` were already sent."""
        translator = Translator()
        position = 0
        while position < offset:
            chunk = read_chunk(self._journal, position, min(_CHUNK_BYTES, offset - position))
            translator.translate(chunk.events)
            position = chunk.offset
        translator.notes.clear()
        return translator

    def _read_next(self, state: RelayState, final: bool) -> Chunk | None:
        """Reads and translates the next chunk; None if there is nothing to send now."""
        if state.mark is None and not final and self._first_start() is None:
            return None
        chunk = read_chunk(self._journal, state.offset, _CHUNK_BYTES)
        if chunk.offset == state.offset:
            return None
        for position in chunk.corrupt:
            self._log.error("left out a line that is no journal event, at byte %d", position)
        state.refused += len(chunk.corrupt)
        self._pending.extend(self._translator.translate(chunk.events))
        for note in self._translator.notes:
            self._log.warning("%s", note)
        self._translator.notes.clear()
        self._chunk = chunk
        return chunk

    def _open(self, sink: Sink, state: RelayState) -> None:
        """Finds or creates the run in the tracker, and stores its mark before anything is sent."""
        state.mark = sink.open(self._identity(), state.mark)
        self._is_open = True
        self.to.save(state)

    def _send_pending(self, sink: Sink) -> None:
        while self._pending:
            operation = self._pending[0]
            if isinstance(operation, Artifact) and (why := why_not_sent(self._run_dir, operation.path)):
                self._refused += 1
                self._log.error("the artifact %s is left out: %s", operation.path, why)
            else:
                sink.send(operation)
            self._pending.popleft()

    def _commit(self, sink: Sink, state: RelayState, chunk: Chunk) -> None:
        """Makes the chunk durable in the tracker, then stores the offset after it."""
        if self._is_open:
            state.mark = sink.commit() or state.mark
        state.refused += self._refused
        self._refused = 0
        state.offset = chunk.offset
        self.to.save(state)
        self.sent_events += len(chunk.events)
        self._chunk = None

    def _refuse(self, what: str, why: object) -> None:
        self._refused += 1
        self._log.error("%s refused %s, it is left out: %s", self.to.tracker.title, what, why)

    def _first_start(self) -> Started | None:
        return next((event for event in iterate(self._journal) if isinstance(event, Started)), None)

    def _identity(self) -> Identity:
        start = self._first_start()
        if start is not None:
            return Identity(start.experiment, start.name, start.run_id, start.t)
        # The run died before its start event. Its folder is runs/<experiment>/<timestamp>-<name>-<id>.
        folder = self._run_dir.resolve()
        first = next(iterate(self._journal))
        return Identity(folder.parent.name, folder.name, folder.name.rpartition("-")[2], first.t)

    def _note_failure(self, error: BaseException) -> None:
        is_ours = isinstance(error, RequestError)
        said = str(error) if is_ours else f"{type(error).__name__}: {library_error(error)}"
        text = self.to.scrubbed(said)[:_ERROR_LENGTH]
        self.cause = cause_of(error, self.to.scrubbed)
        if text != self.last_error:
            self._log.warning("not sent, trying again: %s", text)
        self.last_error = text


def mark_of(folder: Path, cfg: Any, asks: bool = False) -> str | None:
    """The mark of a sweep's parent run in a tracker. The parent run is created if it does not exist yet.

    Args:
        folder: the sweep's folder.
        cfg: the tracker's configuration.
        asks: the tracker is asked whether it still has the parent run.

    Returns:
        The mark; None if the folder is gone, and the run then has no parent.

    Raises:
        ParentUnknown: the tracker cannot be reached, or another process is creating the parent run.
    """
    to = destination(folder, cfg)
    if not to.journal.is_file():
        return None
    forwarder = Forwarder(to, asks)
    try:
        known = forwarder.known_mark()
        if known is None:
            forwarder.try_step(final=False)
            known = forwarder.known_mark()
    finally:
        forwarder.close()
    if known is not None:
        return known
    raise ParentUnknown(f"the run of the sweep {folder}: {forwarder.last_error or 'not yet there'}")


def cause_of(error: BaseException, scrubbed: Callable[[str], str]) -> str:
    """Why a tracker did not answer, in few words: what the system said, where libraries have wrapped it in others.

    Args:
        error: what a tracker's library has raised.
        scrubbed: removes the credentials from a text.
    """
    # Our own messages say what is wrong and what to do.
    is_ours = type(error).__module__.startswith("ortlaunch.")
    seen: list[BaseException] = [] if is_ours else [error]
    for inner in seen:  # The list grows: urllib3 keeps some causes among the arguments only.
        if isinstance(inner, TimeoutError):
            return "it does not answer in time"
        if isinstance(inner, OSError) and inner.strerror:
            return scrubbed(inner.strerror)
        if isinstance(inner, ConnectionError):
            return scrubbed(str(inner))
        further = (inner.__cause__, inner.__context__, *inner.args)
        seen += [one for one in further if isinstance(one, BaseException) and one not in seen]
    said = scrubbed(library_error(error))
    return said if is_ours else said[:_CAUSE_LENGTH]


class _ScrubbingFormatter(logging.Formatter):
    def __init__(self, title: str, hide: Callable[[str], str]) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {title.replace('%', '%%')}: %(message)s")
        self._hide = hide

    def format(self, record: logging.LogRecord) -> str:
        return self._hide(super().format(record))


class _QuietFile(logging.FileHandler):
    def _open(self) -> Any:
        # In a folder of another user, a link could lead to any file of this user.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        return open(os.open(self.baseFilename, flags, 0o644), "a", encoding=self.encoding)

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line. If a secret was removed from it, the file is for its owner alone."""
        super().emit(record)
        if is_hidden(self.format(record)):
            with suppress(OSError):
                Path(self.baseFilename).chmod(PRIVATE)

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignores the error: a full disk must not print tracebacks to the user's terminal."""


def relay_log(run_dir: Path, title: str, hide: Callable[[str], str]) -> logging.Logger:
    """A logger for one run and tracker that writes to `logs/relay.log`, without credentials.

    Args:
        run_dir: the run folder.
        title: the tracker's name in messages.
        hide: removes the credentials from a line.
    """
    log = logging.Logger("ortlaunch.relay", logging.INFO)
    try:
        Run(run_dir).logs.mkdir(exist_ok=True)
        if Run(run_dir).logs.is_symlink():
            raise OSError(errno.ELOOP, "the folder of the logs is a link")
        handler: logging.Handler = _QuietFile(Run(run_dir).relay_log, encoding="utf-8")
    except OSError:
        handler = logging.NullHandler()
    handler.setFormatter(_ScrubbingFormatter(title, hide))
    log.addHandler(handler)
    return log
