"""The relay: sends a run's journal to MLflow, beside the run and after it, whatever becomes of the server.

`Relay` does so in a thread of the launcher, `sync` once in the foreground. Both go on where the last one stopped.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ortlaunch.base.secrets import redacted
from ortlaunch.config.schema import MlflowConfig
from ortlaunch.run.run import Run
from ortlaunch.tracking.forward import Forwarder, unsent_events

_POLL_SECONDS = 0.5
_GATHER_SECONDS = 5.0
"""What is journalled in this time goes in one request: one alone costs client and server the time of 70 points."""
_BACKOFF_SECONDS = (0.5, 1.0, 2.0, 5.0)
_HURRIED_SECONDS = 1.0
_PARTING_SECONDS = 0.3
_NICENESS = 10


@dataclass(frozen=True)
class RelayResult:
    """How far a run's journal got."""

    sent: bool
    """All of it is in MLflow."""
    unsent_events: int
    mlflow_run_id: str | None
    message: str
    """One line for the user; empty if there is nothing to say."""
    sent_events: int = 0
    """Sent by this relay."""


class Relay:
    """Sends `run_dir/journal.jsonl` while the run writes it. Nothing it meets is raised into its owner."""

    def __init__(self, run_dir: Path, cfg: MlflowConfig) -> None:
        self._run_dir = run_dir
        self._cfg = cfg
        self._forwarder = Forwarder(run_dir, cfg)
        self._thread = threading.Thread(target=self._work, name="ortlaunch-relay", daemon=True)
        self._hurry = threading.Event()
        self._abort = threading.Event()

    def start(self) -> None:
        """Begins to send in the background."""
        self._thread.start()

    def finish(self, deadline_seconds: float) -> RelayResult:
        """Sends what is left and stops, after `deadline_seconds` at the latest."""
        if not self._thread.ident:
            self._thread.start()
        self._hurry.set()
        self._thread.join(max(0.0, deadline_seconds - _PARTING_SECONDS))
        self._abort.set()
        self._thread.join(_PARTING_SECONDS)
        return _result(self._run_dir, self._cfg, self._forwarder)

    def _work(self) -> None:
        with suppress(OSError):
            # On Linux this thread's alone: where both want a core, the workers have it. Never less nice than it was.
            thread = threading.get_native_id()
            nice = max(_NICENESS, os.getpriority(os.PRIO_PROCESS, thread))
            os.setpriority(os.PRIO_PROCESS, thread, nice)
        failures = 0
        while not self._abort.is_set():
            last = self._hurry.is_set()  # Asked before the step: what is journalled before finish() is still sent.
            outcome = self._forwarder.try_step(final=last)
            if outcome is None:
                self._pause(_BACKOFF_SECONDS[min(failures, len(_BACKOFF_SECONDS) - 1)])
                failures += 1
                continue
            failures = 0
            if not outcome and last:
                break
            if not self._forwarder.behind:
                self._hurry.wait(_GATHER_SECONDS if outcome else _POLL_SECONDS)
        self._forwarder.close()

    def _pause(self, seconds: float) -> None:
        if self._hurry.is_set():
            self._abort.wait(min(seconds, _HURRIED_SECONDS))
        else:
            self._hurry.wait(seconds)


def sync(run_dir: Path, cfg: MlflowConfig) -> RelayResult:
    """Sends what is left of a run's journal, in the foreground; gives up after some tries without success."""
    forwarder = Forwarder(run_dir, cfg)
    failures = 0
    try:
        while failures < len(_BACKOFF_SECONDS):
            outcome = forwarder.try_step(final=True)
            if outcome is None:
                time.sleep(_BACKOFF_SECONDS[failures] if failures + 1 < len(_BACKOFF_SECONDS) else 0)
                failures += 1
            elif outcome:
                failures = 0
            else:
                break
    finally:
        forwarder.close()
    return _result(run_dir, cfg, forwarder)


def _result(run_dir: Path, cfg: MlflowConfig, forwarder: Forwarder) -> RelayResult:
    unsent, run_id = unsent_events(run_dir, cfg.uri)
    parts = []
    if unsent:
        why = f" ({forwarder.last_error})" if forwarder.last_error else ""
        parts.append(f"{unsent} journal events have not reached MLflow at {redacted(cfg.uri)}{why}")
        parts.append(f"send them with: ortlaunch sync {run_dir}")
    if forwarder.refused:
        parts.append(f"{forwarder.refused} values were left out: see {Run(run_dir).relay_log}")
    return RelayResult(unsent == 0, unsent, run_id, "; ".join(parts), forwarder.sent_events)
