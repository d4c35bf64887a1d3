"""What a tracker is: the launcher's side of it (`Tracker`) and the relay's side (`Sink`).

A tracker of an installed package is a subclass of `Tracker`, named by an entry point of the group `ortlaunch.trackers`.
The launcher imports its module when it is chosen, so the library behind it is imported in `Tracker.sink` or later.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from ortlaunch.base.secrets import is_secret, without_secrets
from ortlaunch.config.schema import TrackingConfig
from ortlaunch.tracking.translate import Operation

C = TypeVar("C")


@dataclass(frozen=True)
class Identity:
    """What a run is called."""

    experiment: str
    name: str
    run_id: str
    """ortlaunch's own short id, a tag in MLflow."""
    t: int
    """Start in milliseconds."""


@dataclass(frozen=True)
class Context:
    """What a sink is given beside its configuration."""

    run_dir: Path
    log: logging.Logger
    """Writes to `logs/relay.log` of the run folder."""
    refuse: Callable[[str, object], None]
    """Logs and counts something that the tracker will never take: what it is, and the reason."""
    mark_of: Callable[[Path], str | None]
    """The mark of another run folder, such as the sweep's, which is sent first; None for a folder that is gone."""


class Sink(Protocol):
    """One run in one tracker.

    The relay calls a sink from one thread. Every method may raise: the relay logs the error and calls again later with
    the same operation. After a crash it sends everything since the last `commit` again, so sending twice must be
    harmless.
    """

    def open(self, identity: Identity, mark: str | None) -> str:
        """Connects, and finds or creates the run.

        Args:
            identity: what the run is called.
            mark: what `open` or `commit` returned last for this run; None the first time.

        Returns:
            The mark to keep, such as the tracker's id of the run.
        """
        ...

    def send(self, operation: Operation) -> None:
        """Carries out one operation; a kind that the tracker has no place for is passed over."""
        ...

    def commit(self) -> str | None:
        """Makes lasting what was sent; the relay then stores its offset together with the mark returned.

        Returns:
            The new mark; None if it is still the same.
        """
        return None

    def holds(self, mark: str) -> bool:
        """Whether the tracker still has what it had at a mark; if not, the run is sent again from its beginning.

        It is called before `open` and must not wait for a server.
        """
        return True

    def close(self) -> None:
        """Nothing more comes from this process."""
        return


class Tracker(Generic[C]):
    """A kind of place where runs are recorded.

    `C` is the type of its configuration. Only `sink` must be defined. No method but `sink` may import the library
    behind the tracker.
    """

    title: str = ""
    """What messages call it; empty takes its name."""
    config: type[Any] | Mapping[str, Any] = TrackingConfig
    """A dataclass with a default for every key that need not be given, or a mapping of defaults whose types are kept.
    """
    lists_runs: bool = False
    """Whether it is an overview of runs: queued runs, and sweeps as runs of their own, are then sent to it too."""
    mark_key: str = "mark"
    """Key of the mark in the file of the run folder that says how far the run was sent."""

    def __init__(self, name: str) -> None:
        """
        Args:
            name: what users call it: the option of `tracking`.
        """
        self.name = name
        self.title = self.title or name

    def check(self, cfg: C) -> None:
        """Refuses a configuration that cannot work.

        Raises:
            RequestError: with the key and what to do.
        """

    def resolved(self, cfg: C, cwd: Path) -> C:
        """The configuration with paths relative to `cwd` made absolute."""
        return cfg

    def public(self, cfg: C) -> C:
        """The configuration as it may be written into the run folder: without credentials."""
        assert dataclasses.is_dataclass(cfg) and not isinstance(cfg, type)
        values = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
        hidden = {key: _hidden(key, value) for key, value in values.items()}
        return dataclasses.replace(cfg, **hidden)

    def environment(self, cfg: C) -> dict[str, str]:
        """Variables that carry to a cluster's job what `public` takes away."""
        return {}

    def restored(self, cfg: C, environment: Mapping[str, str]) -> C:
        """The configuration of a run folder with what `environment` carried here."""
        return cfg

    def place(self, cfg: C) -> str:
        """Where the records go, for messages, without credentials; another place means that nothing was sent there."""
        return self.name

    def scrubbed(self, cfg: C, text: str) -> str:
        """A text for log and terminal without the configuration's credentials."""
        return without_secrets(text)

    def files(self, cfg: C) -> list[Path]:
        """What it writes outside the run folder; in the user's repository this is no change of theirs."""
        return []

    def compare_command(self, cfg: C, *words: str) -> str | None:
        """The command that compares the chosen runs there; None if there is none.

        Args:
            cfg: the configuration.
            words: options of `ortlaunch compare` that choose them.
        """
        return None

    def where(self, cfg: C, run_dir: Path, mark: str | None) -> str:
        """Where one run is, in a few words."""
        return f"{self.title} at {self.place(cfg)}"

    def lines(self, cfg: C, run_dir: Path, experiment: str, mark: str | None) -> list[tuple[str, str]]:
        """What to say of a run at its end that was sent completely: labels and texts."""
        return [(self.name, self.where(cfg, run_dir, mark))]

    def sink(self, cfg: C, context: Context) -> Sink:
        """Makes the sink of one run."""
        raise NotImplementedError


def _hidden(key: str, value: Any) -> Any:
    """The value without what is secret by its key, or looks like a secret; also within mappings and lists."""
    if isinstance(value, Mapping):
        return {name: _hidden(str(name), one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_hidden(key, one) for one in value]
    if not isinstance(value, str):
        return value
    return "***" if value and is_secret(key) else without_secrets(value)
