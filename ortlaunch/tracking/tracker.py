"""The interfaces of a tracker: `Tracker` for the launcher, and `Sink` for the relay.

A tracker of an installed package is a subclass of `Tracker` that an entry point of the group `ortlaunch.trackers`
names. The launcher imports its module when a run chooses the tracker. The module must therefore import the tracker's
library in `Tracker.sink` or later.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ortlaunch.base.secrets import hidden, without_secrets
from ortlaunch.config.schema import TrackingConfig

if TYPE_CHECKING:
    from ortlaunch.tracking.translate import Operation

C = TypeVar("C")


@dataclass(frozen=True)
class Identity:
    """The names and the start time of a run."""

    experiment: str
    name: str
    run_id: str
    """ortlaunch's short id, which is a tag in MLflow."""
    t: int
    """The run's start in milliseconds since the epoch."""


@dataclass(frozen=True)
class Context:
    """What a sink gets in addition to its configuration."""

    run_dir: Path
    log: logging.Logger
    """A logger that writes to `logs/relay.log` in the run folder."""
    refuse: Callable[[str, object], None]
    """Logs and counts an item that the tracker will never accept. The arguments are the item's name and the reason."""
    mark_of: Callable[[Path], str | None]
    """Returns the mark of another run folder, such as the sweep's, which it sends first; None if the folder is gone."""


class RecordLost(Exception):
    """The tracker answers that it no longer has the run. The relay then sends the whole run again, as a new one."""


class RecordRefused(Exception):
    """The tracker does not take the run until somebody changes something there. The relay waits no longer for it."""


class Sink(Protocol):
    """One run in one tracker.

    The relay calls a sink from one thread. Every method may raise: the relay logs the error and calls again later with
    the same operation; after `RecordLost` it sends the whole run again. After a crash it sends everything since the
    last `commit` again, so sending twice must be harmless.
    """

    def open(self, identity: Identity, mark: str | None) -> str:
        """Connects, and finds or creates the run.

        Args:
            identity: the run's names and start time.
            mark: the mark that `open` or `commit` returned last for this run; None the first time.

        Returns:
            The mark to keep, such as the tracker's id of the run.
        """
        ...

    def send(self, operation: Operation) -> None:
        """Executes one operation. It ignores a kind of operation that the tracker cannot store."""
        ...

    def commit(self) -> str | None:
        """Makes what was sent durable. The relay then stores its offset together with the returned mark.

        Returns:
            The new mark; None if it is still the same.
        """
        return None

    def holds(self, mark: str) -> bool:
        """Whether the tracker still has what it had at a mark. If not, the relay sends the whole run again.

        The relay calls this before `open`. It must not wait for a server.
        """
        return True

    def has_lost(self, mark: str) -> bool:
        """Whether the tracker answers that it has no run with this mark. `ortlaunch sync` asks, and waits for that."""
        return False

    def close(self) -> None:
        """Ends the use of this sink: this process sends nothing more."""
        return


class Tracker(Generic[C]):
    """A system that records runs.

    `C` is the type of its configuration. A subclass must define `sink`; all other methods have defaults. Only `sink`
    may import the tracker's library.
    """

    title: str = ""
    """The tracker's name in messages; empty uses its name in the configuration."""
    config: type[Any] | Mapping[str, Any] = TrackingConfig
    """A dataclass with defaults for all optional keys, or a mapping of defaults, whose types become the keys' types."""
    lists_runs: bool = False
    """Whether users look for runs in the tracker. Queued runs, and sweeps as runs of their own, are then sent too."""
    keeps_artifacts: bool = True
    """Whether it stores files and folders of a run."""
    mark_key: str = "mark"
    """The key of the mark in the tracker's file in the run folder."""
    variable: str = ""
    """The environment variable from which `restored` takes the credentials, for messages; empty if there is none."""

    def __init__(self, name: str) -> None:
        """
        Args:
            name: the tracker's name in the configuration, an option of `tracking`.
        """
        self.name = name
        self.title = self.title or name

    def check(self, cfg: C) -> None:
        """Checks the configuration.

        Raises:
            RequestError: the configuration cannot work. The message names the key and the remedy.
        """

    def resolved(self, cfg: C, cwd: Path) -> C:
        """The configuration with absolute paths. Relative paths start from `cwd`."""
        return cfg

    def public(self, cfg: C) -> C:
        """The configuration without credentials, as it may be written to the run folder."""
        assert dataclasses.is_dataclass(cfg) and not isinstance(cfg, type)
        values = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
        return dataclasses.replace(cfg, **hidden("", values))

    def environment(self, cfg: C) -> dict[str, str]:
        """The environment variables that pass the credentials, which `public` removes, to a cluster's job."""
        return {}

    def restored(self, cfg: C, environment: Mapping[str, str]) -> C:
        """The configuration of a run folder with the credentials from the environment variables."""
        return cfg

    def place(self, cfg: C) -> str:
        """The place of the records without credentials. If it changes, the run is sent again from its beginning."""
        return self.name

    def scrubbed(self, cfg: C, text: str) -> str:
        """The text without the configuration's credentials, for log and terminal."""
        return without_secrets(text)

    def files(self, cfg: C) -> list[Path]:
        """The files that it writes outside the run folder. They do not count as changes in the user's repository."""
        return []

    def compare_command(self, cfg: C, *words: str) -> str | None:
        """The command that compares runs in this tracker; None if there is no such command.

        Args:
            cfg: the configuration.
            words: the options of `ortlaunch compare` that choose the runs.
        """
        return None

    def where(self, cfg: C, run_dir: Path, mark: str | None) -> str:
        """A short text that says where one run is recorded."""
        return f"{self.title} at {self.place(cfg)}"

    def lines(self, cfg: C, run_dir: Path, experiment: str, mark: str | None) -> list[tuple[str, str]]:
        """The lines to print at the end of a run that was sent completely, as labels and texts."""
        return [(self.name, self.where(cfg, run_dir, mark))]

    def sink(self, cfg: C, context: Context) -> Sink:
        """Makes the sink of one run."""
        raise NotImplementedError
