"""Reports a worker's failure at the terminal.

A worker that fails writes ``failures/rank-N.json`` in the run folder, and the launcher shows the first failure. A
worker that was killed writes no such file. Its rank is then read from torchrun's report.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ortlaunch.base.errors import RequestError
from ortlaunch.base.files import replace_text
from ortlaunch.base.own_code import is_users, last_frames, where_it_ended
from ortlaunch.base.reading import notice, read_json, read_tail
from ortlaunch.base.secrets import without_secrets
from ortlaunch.run.attempt import last_attempt
from ortlaunch.run.run import Run

_TAIL_LINES = 15
_LOG_BYTES = 4 << 20
"""The part of a log, from its end, that is read."""
_READ_LINES = 200
"""Lines in which secrets are looked for before the last `_TAIL_LINES` are taken: a private key has up to 60."""
_ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Failure|Unsupported): \S")
"""The line of a traceback that names the error."""
_ENDED = "the worker was ended by"


@dataclass(frozen=True)
class Failure:
    """One worker's failure."""

    rank: int
    host: str
    message: str
    """The last lines of the traceback, or the message of a wrong request."""
    is_request: bool
    """The request was wrong (exit code 2) rather than the training (exit code 1)."""
    time: float
    """Seconds since the epoch."""

    @property
    def gist(self) -> str:
        """The message in one line."""
        return gist_of(self.message)


def gist_of(message: str) -> str:
    """A failure's message in one line: how the worker was ended, or the traceback's line that names the error."""
    lines = message.strip().splitlines() or [""]
    if lines[0].startswith(_ENDED):
        return lines[0].partition(";")[0]
    # After it there may be further lines of its message, such as hints.
    return next((line for line in reversed(lines) if _ERROR.match(line)), lines[-1])


def record(run_dir: Path, rank: int, error: BaseException, host: str | None = None) -> None:
    """Writes a worker's failure. It never raises an OSError, which would hide the first error.

    Args:
        run_dir: the run folder.
        rank: the worker that failed.
        error: the exception that ended it.
        host: the worker's machine; None for this machine.
    """
    is_request = isinstance(error, RequestError)
    message = str(error) if is_request else _end_of(error)
    failure = Failure(rank, host or socket.gethostname(), without_secrets(message), is_request, time.time())
    try:
        folder = Run(run_dir).failures
        folder.mkdir(exist_ok=True)
        replace_text(Run(run_dir).failure_file(rank), json.dumps(asdict(failure)))
    except OSError:
        traceback.print_exc()


def _end_of(error: BaseException) -> str:
    """The traceback's last lines. If the last line of the user's own code is further up, it comes first."""
    # Secrets are removed before the text is cut, because a part of one may not look like one.
    lines = without_secrets("".join(traceback.format_exception(error))).strip().splitlines()
    shown = "\n".join(lines[-_TAIL_LINES:])
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    place = f'  File "{own[-1].filename}", line {own[-1].lineno}, in {own[-1].name}' if own else ""
    if not own or place in shown:
        return shown
    return f"{place}\n    {own[-1].line}\n  …\n{shown}"


def is_request(run_dir: Path) -> bool:
    """Whether some worker found the request wrong. A restart would fail in the same way."""
    return any(failure.is_request for failure in _all(run_dir))


def first(run_dir: Path, *torchrun_logs: Path) -> Failure | None:
    """The first failure. The other workers fail because of it: they wait for a peer that is gone.

    Args:
        run_dir: the run folder.
        torchrun_logs: the log of each machine's torchrun. It names workers that were killed.
    """
    for log in torchrun_logs:
        killed = _killed(run_dir, log)
        if killed is not None:
            return killed
    found = min(_all(run_dir), key=lambda failure: failure.time, default=None)
    exited = (_exited(run_dir, log) for log in torchrun_logs if found is None)
    return found or next((one for one in exited if one is not None), None)


def _all(run_dir: Path) -> list[Failure]:
    """The failures that can be read."""
    found = [_read(path) for path in Run(run_dir).failures.glob("rank-*.json")]
    return [failure for failure in found if failure is not None]


def _read(path: Path) -> Failure | None:
    found = parsed(read_json(path))
    if found is None:
        notice(path, "it describes no failure")
    return found


def parsed(content: dict[str, Any] | None) -> Failure | None:
    """The failure that a failure file's content describes; None if it describes none."""
    content = content or {}
    types: dict[str, Any] = {"rank": int, "host": str, "message": str, "is_request": bool, "time": (int, float)}
    if content.keys() != types.keys() or not all(isinstance(content[name], kind) for name, kind in types.items()):
        return None
    return Failure(**content)


def _killed(run_dir: Path, torchrun_log: Path) -> Failure | None:
    """The worker that a signal killed before torchrun stopped the others; None if the log reports none."""
    log = read_tail(torchrun_log, _LOG_BYTES) if torchrun_log.is_file() else ""
    # Earlier parts of the log are about attempts that were restarted.
    attempt = last_attempt(log)
    killed = _reported_signals(attempt.text)
    # A worker that torchrun stopped ended by SIGTERM. A worker that raised an exception has a failure file. torchrun's
    # own "root cause" is no help: with several failures it depends on the order in which torchrun polled the workers.
    candidates = [
        rank
        for rank, number in sorted(killed.items())
        if number != signal.SIGTERM and not Run(run_dir).failure_file(rank).exists()
    ]
    if not candidates:
        return None
    rank = candidates[0]
    return Failure(rank, attempt.host or socket.gethostname(), _killed_message(run_dir, rank, killed[rank]), False, 0.0)


def _exited(run_dir: Path, torchrun_log: Path) -> Failure | None:
    """The worker that torchrun saw first end with an exit code of its own, as a script does; None if there is none."""
    attempt = last_attempt(read_tail(torchrun_log, _LOG_BYTES) if torchrun_log.is_file() else "")
    report = attempt.text.rpartition("ChildFailedError")[2].rpartition("Root Cause")[2]
    found = re.search(r"rank\s*:\s*(\d+)[^\[]*?exitcode\s*:\s*(\d+)", report)
    if found is None:
        return None
    rank = int(found[1])
    log = Run(run_dir).rank_log(rank)
    said = last_attempt(read_tail(log, _LOG_BYTES)).text if log.is_file() else ""
    tail = without_secrets("\n".join(said.strip().splitlines()[-_READ_LINES:])).splitlines()[-_TAIL_LINES:]
    text = "\n".join([f"the worker ended with exit code {found[2]}; the last lines of its log:", *tail])
    return Failure(rank, attempt.host or socket.gethostname(), text, False, 0.0)


def _reported_signals(log: str) -> dict[int, int]:
    """The signals that ended workers, by rank, in torchrun's report of a failed attempt."""
    report = log.rpartition("ChildFailedError")[2]
    exit_codes = re.findall(r"rank\s*:\s*(\d+)[^\[]*?exitcode\s*:\s*(-\d+)", report)
    return {int(rank): -int(code) for rank, code in exit_codes}


def _killed_message(run_dir: Path, rank: int, number: int) -> str:
    """The signal that ended a worker, and the last lines of the worker's log."""
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    hint = " (out of memory?)" if number == signal.SIGKILL else ""
    log = Run(run_dir).rank_log(rank)
    frames, text = last_frames(read_tail(log, _LOG_BYTES) if log.is_file() else "", number)
    tail = without_secrets("\n".join(text.strip().splitlines()[-_READ_LINES:])).splitlines()[-_TAIL_LINES:]
    where = where_it_ended(frames)
    return "\n".join([f"{_ENDED} {name}{hint}{where}; the last lines of its log:", *tail])
